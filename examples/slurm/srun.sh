#!/bin/bash
# Each task of srun is a worker; nothing else is needed.
#   sbatch examples/slurm/srun.sh
#SBATCH --job-name=movies
#SBATCH --ntasks=4
#SBATCH --cpus-per-task=1
#SBATCH --time=00:30:00
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}  # since SLURM 22.05 srun does not take it from sbatch
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1} TF_NUM_INTRAOP_THREADS=${SLURM_CPUS_PER_TASK:-1}
srun python examples/movielens.py
