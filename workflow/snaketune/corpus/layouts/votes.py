"""A prompt, two answers, and a verdict on them: of one or several judges, or a score of each. Ties are dropped."""

from snaketune.corpus.rows import Dropped, Malformed, Preference
from snaketune.corpus.values import completions, verdicts
from snaketune.corpus.values.cells import number_of
from snaketune.corpus.values.completions import pair_of
from snaketune.corpus.values.row_file import RowFile
from snaketune.corpus.values.schema import Schema, Values, Variant, columns_in


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
            file.numeric_verdicts |= verdicts.numeric_verdicts(votes)
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
    return pair_of(values, answers[best - 1], answers[2 - best], file)


SCHEMA = Schema(
    "votes",
    read,
    Variant("answers verdict", verdicts.ANSWER, verdicts.VERDICT, verdicts.SCORES, *completions.PROMPT),
    Variant("answers ratings", verdicts.ANSWER, verdicts.SCORES, *completions.PROMPT),
    kinds=("preferences",),
)
