"""Recognised files without rows, or in unsupported formats: what each is, and what to do about it."""

import re

from snaketune.corpus.reading.encodings import other_unicode
from snaketune.errors import SnaketuneError

BYTES_CHECKED = 1024
WORKBOOK = "save it as CSV, or write it as Parquet with pandas: read_excel(...).to_parquet(...)"
WEB_PAGE = "is a web page and not the data: a page to log in, or an error; fetch the file itself"
ARCHIVE = "which isn't supported; unpack it, and name the files in it"
UNREADABLE = {
    rb"PK(\x03\x04|\x05\x06)": f"is a zip archive inside another archive or a compressed file, {ARCHIVE}",
    rb"7z\xbc\xaf\x27\x1c": f"is a 7z archive, {ARCHIVE}",
    rb"Rar!\x1a\x07": f"is a RAR archive, {ARCHIVE}",
    rb"BZh": "is compressed with bzip2; decompress it, or compress it with gzip, xz or zstd",
    rb"version https://git-lfs": "is a Git LFS pointer and not the data; fetch that with `git lfs pull`",
    rb"%PDF-": "is a PDF, which holds no rows; extract the text, for instance with `pdftotext`",
    rb"SQLite format 3\0": "is an SQLite database; write a table of it as CSV: "
    "`sqlite3 -csv -header FILE 'select * from TABLE' > rows.csv`",
    rb"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": f"is a document of Microsoft Office, as Excel's .xls; {WORKBOOK}",
    rb"\x80[\x02-\x05]": "is a Python pickle, which isn't read because it can run code; if you trust it, write it as Parquet "
    "with pandas: read_pickle(...).to_parquet(...)",
    rb"(?i)(\xef\xbb\xbf)?\s*(<\?xml[^>]*>\s*)?(<!--.*?-->\s*)*<(!doctype\s+html|html|head)\b": WEB_PAGE,
}
UNREADABLE_PATTERNS = {re.compile(pattern, re.DOTALL): what for pattern, what in UNREADABLE.items()}
# Members that identify documents that are zip archives.
ZIP_DOCUMENTS = {
    r"xl/": f"is an Excel workbook; {WORKBOOK}",
    r"word/": "is a Word document, which holds no rows; save it as plain text",
    r"content\.xml": f"is a document of OpenOffice; a sheet: {WORKBOOK}",
    r".*data\.pkl": "is a PyTorch checkpoint, which holds no rows",
}


def refuse(head: bytes, display_name: str) -> None:
    """Raise SnaketuneError if a file begins like one that isn't data.

    Args:
        head: its beginning, decompressed.
        display_name: its name in messages.
    """
    for pattern, what_to_do in UNREADABLE_PATTERNS.items():
        if pattern.match(head[:BYTES_CHECKED]):
            raise SnaketuneError(f"{display_name} {what_to_do}")
    encoding = other_unicode(head)
    if encoding:
        raise SnaketuneError(
            f"{display_name} is {encoding.upper()} and not UTF-8; set `encoding: {encoding}` of its source, "
            f"or write it again in UTF-8: `iconv -f {encoding.upper()} -t UTF-8`"
        )
    if head and not head.strip(b"\0"):
        raise SnaketuneError(
            f"{display_name} holds nothing but zero bytes, like a file that wasn't written completely; fetch it again"
        )


def refuse_zipped(names: list[str], display_name: str) -> None:
    """Raise SnaketuneError if the members of a zip archive are those of a document."""
    for pattern, what_to_do in ZIP_DOCUMENTS.items():
        if any(re.match(pattern, name) for name in names):
            raise SnaketuneError(f"{display_name} {what_to_do}")
