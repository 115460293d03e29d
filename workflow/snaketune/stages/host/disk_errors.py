"""Disk errors (a full disk, missing permissions) as one message, whichever library raised them, and in whichever process."""

import errno
import re

NAMES = ("ENOSPC", "EDQUOT", "EFBIG", "EROFS", "EACCES", "EPERM", "ENOTDIR", "EIO")
DISK_ERRNOS = {getattr(errno, name) for name in NAMES}
# Libraries in Rust raise exception classes of their own, with the errno only in the text.
IN_RUST = re.compile(r"\(os error (\d+)\)")


def disk_error_message(error: BaseException) -> str | None:
    """A message for an error that comes from the disk, with what to do; None for any other error."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (match := IN_RUST.search(str(error))):
        number = int(match[1])
    if number not in DISK_ERRNOS:
        return None
    what = getattr(error, "strerror", None) or str(error)
    where = getattr(error, "filename", None)
    return (
        f"the results can't be written: {what}{f': {where}' if where else ''}. Free disk space (snakemake clean_work frees old "
        "work) or correct the folder's permissions, and run again; finished results are retained"
    )
