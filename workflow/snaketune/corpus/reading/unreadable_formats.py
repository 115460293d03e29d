"""Files that hold no rows, or none that are read here: what each is, and what to do about it."""

import re

from snaketune.corpus.reading.encodings import other_unicode
from snaketune.errors import SnaketuneError

BYTES_CHECKED = 1024
WORKBOOK = "save it as CSV, or write it as Parquet with pandas: read_excel(...).to_parquet(...)"
WEB_PAGE = "is a web page and not the data: a page to log in, or an error; fetch the file itself"
ARCHIVE = "which isn't unpacked here; unpack it, and name the files in it"
UNREADABLE = {
    rb"PK(\x03\x04|\x05\x06)": f"is a zip archive within another packing, {ARCHIVE}",
    rb"7z\xbc\xaf\x27\x1c": f"is a 7z archive, {ARCHIVE}",
    rb"Rar!\x1a\x07": f"is a RAR archive, {ARCHIVE}",
    rb"BZh": "is packed with bzip2; unpack it, or pack it with gzip, xz or zstd",
    rb"version https://git-lfs": "is a Git LFS pointer and not the data; fetch that with `git lfs pull`",
    rb"%PDF-": "is a PDF, which holds no rows; take the text out, with `pdftotext` for instance",
    rb"SQLite format 3\0": "is an SQLite database; write a table of it as CSV: "
    "`sqlite3 -csv -header FILE 'select * from TABLE' > rows.csv`",
    rb"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": f"is a document of Microsoft Office, as Excel's .xls; {WORKBOOK}",
    rb"\x80[\x02-\x05]": "is a Python pickle, which isn't read, since it runs code; where you trust it, write it as Parquet "
    "with pandas: read_pickle(...).to_parquet(...)",
    rb"(?i)(\xef\xbb\xbf)?\s*(<\?xml[^>]*>\s*)?(<!--.*?-->\s*)*<(!doctype\s+html|html|head)\b": WEB_PAGE,
}
UNREADABLE_PATTERNS = {re.compile(pattern, re.DOTALL): what for pattern, what in UNREADABLE.items()}
# Members by which formats that are zip archives are known.
ZIP_DOCUMENTS = {
    r"xl/": f"is an Excel workbook; {WORKBOOK}",
    r"word/": "is a Word document, which holds no rows; save it as plain text",
    r"content\.xml": f"is a document of OpenOffice; a sheet: {WORKBOOK}",
    r".*data\.pkl": "is a checkpoint of PyTorch, and no data",
}


def refuse(head: bytes, display_name: str) -> None:
    """Raise SnaketuneError if a file begins as something else than data does.

    Args:
        head: its beginning, unpacked.
        shown: its name.
    """
    for pattern, what_to_do in UNREADABLE_PATTERNS.items():
        if pattern.match(head[:BYTES_CHECKED]):
            raise SnaketuneError(f"{display_name} {what_to_do}")
    encoding = other_unicode(head)
    if encoding:
        raise SnaketuneError(
            f"{display_name} is {encoding.upper()} and not UTF-8; set `encoding: {encoding}` of its source, or write it again: "
            f"`iconv -f {encoding.upper()} -t UTF-8`"
        )
    if head and not head.strip(b"\0"):
        raise SnaketuneError(
            f"{display_name} holds nothing but zero bytes, as files do that were not written to their end; fetch it again"
        )


def refuse_zipped(names: list[str], display_name: str) -> None:
    """Raise SnaketuneError if the members of a zip archive are those of a document."""
    for pattern, what_to_do in ZIP_DOCUMENTS.items():
        if any(re.match(pattern, name) for name in names):
            raise SnaketuneError(f"{display_name} {what_to_do}")
