# Sourced in the empty working directory of a pod, with VOLUME set: links what is on the volume, as if the pod worked there.
#
# Snakemake unpacks the Snakefile, rules, environments and configs of the run into this folder. So the pod gets copies of these,
# or pods would overwrite files that others read; the rest is linked, results and their work folders too.
for entry in "$VOLUME"/*; do
  case ${entry##*/} in
    Snakefile | workflow | config | envs | profiles | *.yaml) cp -r "$entry" . ;;
    *) ln -s "$entry" . ;;
  esac
done
# Downloads are shared by all pods.
export HF_HOME="${HF_HOME:-$VOLUME/.cache/huggingface}"
# Snakemake would install its storage plugin in each pod; the image has it.
pip() { :; }
