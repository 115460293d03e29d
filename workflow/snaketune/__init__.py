"""snaketune: raw conversations and preferences in, an evaluated, aligned language model out."""
