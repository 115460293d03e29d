"""Tables hand on what they were given."""

import pyarrow as pa

from snaketune.tables import count_rows, read_table, write_table


def test_a_table_is_read_as_it_was_written_whatever_the_batches(tmp_path):
    schema = pa.schema(
        [
            ("id", pa.string()),
            ("ids", pa.list_(pa.int32(), 3)),
            ("turns", pa.list_(pa.struct([("role", pa.string()), ("weight", pa.float32())]))),
            ("mask", pa.large_list(pa.bool_())),
            ("logp", pa.float64()),
        ]
    )
    rows = [
        {
            "id": "a\u2028b",
            "ids": [1, -100, 3],
            "turns": [{"role": "user", "weight": 0.1}],
            "mask": [True],
            "logp": 0.1,
        },
        {"id": "", "ids": [2**31 - 1, 0, 0], "turns": [], "mask": [], "logp": None},
        {"id": None, "ids": None, "turns": None, "mask": None, "logp": float("-inf")},
    ]
    table = pa.Table.from_pylist(rows, schema=schema)
    for batch in (1, 2, 1024):
        write_table(tmp_path / "table.arrow", table, batch)
        assert read_table(tmp_path / "table.arrow").equals(table)
        assert read_table(tmp_path / "table.arrow").schema.equals(schema)
        assert count_rows(tmp_path / "table.arrow") == len(rows)
