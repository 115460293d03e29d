"""A disk that is full, or may not be written to, as one sentence: whichever library met it, and in whichever process."""

import errno
import re

DISK_ERRNOS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOTDIR,
    errno.EIO,
}
# Libraries in Rust tell the number in the text only, and each in an exception class of its own.
IN_RUST = re.compile(r"\(os error (\d+)\)")


def disk_error_message(error: BaseException) -> str | None:
    """What to tell of an error that comes from the disk, and what to do; None for any other error.

    >>> disk_error_message(ValueError("no")) is None
    True
    """
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (told := IN_RUST.search(str(error))):
        number = int(told[1])
    if number not in DISK_ERRNOS:
        return None
    what = getattr(error, "strerror", None) or str(error)
    where = getattr(error, "filename", None)
    return (
        f"the results can't be written: {what}{f': {where}' if where else ''}. Make room (snakemake clean_work frees old work) "
        "or mend the folder's permissions, and run again; what was finished is kept"
    )
