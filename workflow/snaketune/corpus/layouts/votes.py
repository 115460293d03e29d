"""A prompt, two answers, and a verdict on them: of one or several judges, or a score of each. Ties are dropped."""

from snaketune.corpus.rows import Dropped, Malformed, Preference
from snaketune.corpus.values import completions, verdicts
from snaketune.corpus.values.cells import may_be_number, number_of
from snaketune.corpus.values.completions import pair_of
from snaketune.corpus.values.row_file import RowFile
from snaketune.corpus.values.schema import Column, Schema, Values, Variant, columns_in


def read(values: Values, file: RowFile) -> Preference:
    answers = values["answers"]
    if not isinstance(answers, list) or len(answers) != 2:
        raise Malformed("missing_column", "expected two answers")
    names = columns_in(file.bound["answers"])
    scores = [number_of(value) for value in values.get("ratings", ())]
    difference = scores[0] - scores[1] if scores and None not in scores else None
    if difference and abs(difference) < file.source.margin:
        raise Dropped("below_margin")
    if "verdict" in values:
        column, found = file.bound["verdict"], values["verdict"]
        several = zip(column, found) if isinstance(column, tuple) else [(column, found)]
        votes = {name: vote for name, vote in several if vote is not None}
        from_zero = names[0].endswith("0")
        if not from_zero:
            # Numbers of selected rows, and those whose column the config names, show nothing.
            selected = {condition.column for condition in file.source.where}
            if "verdict" not in file.stated and selected.isdisjoint(votes):
                file.clues |= verdicts.clues_of(votes)
        best = verdicts.winner(votes, from_zero=from_zero)
        if best and difference and difference * (2 * best - 3) > 0:
            what = f"the scores, {scores[0]:g} and {scores[1]:g}, contradict {next(iter(votes))}"
            raise Malformed("rating_contradicts", what)
    elif difference is None:
        raise Malformed("missing_column", f"{file.names['ratings']}: one isn't a number, or is null")
    else:
        best = 0 if difference == 0 else 1 if difference > 0 else 2
    if best == 0:
        raise Dropped("tie")
    pair = pair_of(values, answers[best - 1], answers[2 - best], file)
    asked = sum(turn["role"] == "user" for turn in [*pair.prompt, *pair.chosen])
    if (turn := number_of(values.get("turn"))) is not None and turn < asked:
        what = (
            f"turn is {turn:g} of {asked}, so the verdict may be on an earlier answer; select rows with "
            f"`where: turn == {asked}`, or name `turn` under `ignore` if the verdict is on the whole conversation"
        )
        raise Malformed("verdict_on_earlier_turn", what)
    return pair


# The number of the answer that the verdict is on; in other data sets the number of turns.
TURN = Column("turn", "turn", holds=may_be_number)
SCHEMA = Schema(
    "votes",
    read,
    Variant("answers verdict", verdicts.ANSWER, verdicts.VERDICT, verdicts.SCORES, TURN, *completions.PROMPT),
    Variant("answers ratings", verdicts.ANSWER, verdicts.SCORES, *completions.PROMPT),
    kinds=("preferences",),
)
