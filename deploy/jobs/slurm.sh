#!/bin/bash
#SBATCH --job-name=quantize
#SBATCH --array=0-7
# One task for each part of a model; N has to be the number of all parts, also
# where some are done again (sbatch --array=2,5):
#
#   N=8 sbatch --array=0-7 slurm.sh SRC -o DST --spec int4:group:128
#
# Afterwards, with the same arguments: quantctl quantize ... --join
exec quantctl quantize "$@" --part "$SLURM_ARRAY_TASK_ID/${N:?}"
