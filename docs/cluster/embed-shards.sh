#!/bin/bash
# Slurm job array that embeds images in 8 shards, with one GPU per shard. Start it, and then a job that merges the parts:
#
#   shards=$(sbatch --parsable embed-shards.sh RUN IMAGES vectors.parquet)
#   sbatch --dependency=afterok:"$shards" --wrap "shortlist embed RUN IMAGES -o vectors.parquet --merge"
#
# To run failed shards again, here 3 and 5:  sbatch --array=3,5 embed-shards.sh RUN IMAGES vectors.parquet
#
#SBATCH --job-name=embed
#SBATCH --array=0-7
#SBATCH --gres=gpu:1
#SBATCH --cpus-per-task=8
#SBATCH --mem=16G
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --output=%x-%A_%a.log
set -euo pipefail

shards=8 # number of shards in the whole array, even if only some of them are run again
run=${1:?folder of the run} images=${2:?images} out=${3:?Parquet file}

exec shortlist embed "$run" "$images" --out "$out" --shard "$SLURM_ARRAY_TASK_ID/$shards"
