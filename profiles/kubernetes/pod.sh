# Sourced in the empty folder that a pod begins in, with VOLUME: what the volume has, as if the pod worked there.
#
# Snakemake unpacks the Snakefile, rules, environments and configs of the run over it. So of these the pod has copies, or one pod
# would write what another one reads; the rest is linked, results and their work folders too.
for entry in "$VOLUME"/*; do
  case ${entry##*/} in
    Snakefile | workflow | config | envs | profiles | *.yaml) cp -r "$entry" . ;;
    *) ln -s "$entry" . ;;
  esac
done
# What is downloaded is downloaded once.
export HF_HOME="${HF_HOME:-$VOLUME/.cache/huggingface}"
# Snakemake would fetch its storage plugin in each pod. It is in the image.
pip() { :; }
