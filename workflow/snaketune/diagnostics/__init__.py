"""Why a run would fail, why it is slow, what would help, and proof that it did."""
