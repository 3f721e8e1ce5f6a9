#!/bin/bash
# `tfring launch` starts a worker for each task of the allocation, and orders what they print.
#   sbatch examples/slurm/launch.sh
#SBATCH --job-name=movies
#SBATCH --ntasks=4
#SBATCH --cpus-per-task=1
#SBATCH --time=00:30:00
tfring launch examples/movielens.py
