#!/bin/bash
# One part of a model for each rank of torchrun, MPI or srun:
#
#   torchrun --no_python --nproc_per_node 8 ranks.sh SRC -o DST --spec int8
#   mpirun -n 8 ranks.sh SRC -o DST --spec int8
#
# Afterwards, with the same arguments: quantctl quantize ... --join
rank=${RANK:-${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-${SLURM_PROCID:?}}}}
size=${WORLD_SIZE:-${OMPI_COMM_WORLD_SIZE:-${PMI_SIZE:-${SLURM_NTASKS:?}}}}
exec quantctl quantize "$@" --part "$rank/$size"
