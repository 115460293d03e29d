"""What SLURM says when it takes no job at present, and would take it later. Any other refusal counts as permanent.

Not here: `Socket timed out` and `Zero Bytes were transmitted`, after which the job may be in the queue.
"""

from collections import Counter

from snaketune.cluster.slurm import run_slurm

# Limits on the number of jobs in the queue: of this user, where without a job in it the limit itself is too low; or of all
# users of an account or QOS, whose jobs may be hidden.
OF_USER = ("AssocMaxSubmitJobLimit", "QOSMaxSubmitJobPerUserLimit")
OF_ALL = ("AssocGrpSubmitJobsLimit", "QOSGrpSubmitJobsLimit", "MaxSubmitJobsPerAccount")
# MaxJobCount of the cluster among them: sbatch says so while it tries again for some minutes.
UNABLE = ("Unable to contact slurm controller", "Slurm temporarily unable to accept job", "controller in standby mode")


def why_to_wait(words: str) -> str:
    """Return why SLURM takes no job at present, and whose jobs fill the queue; empty if waiting may not help.

    Args:
        words: what sbatch said.
    """
    code = next((code for code in OF_USER + OF_ALL if code in words), None)
    if not code:
        return next((said for said in UNABLE if said in words), "")
    whose = ("--me",) if code in OF_USER else ()
    listed = run_slurm("squeue", "--noheader", "--array", *whose, "--format=%u|%a|%q")
    if listed is not None and not listed.strip() and whose:
        return ""
    counts = Counter(tuple(line.split("|")) for line in (listed or "").split())
    jobs = (
        f"{count} of {user} (account {account}, QOS {qos})" for (user, account, qos), count in counts.most_common(4)
    )
    return f"{code}; jobs in the queue: {', '.join(jobs) or 'none that this user may see'}"
