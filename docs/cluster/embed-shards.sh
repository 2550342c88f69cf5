#!/bin/bash
# Embeds images in 8 shards, as a Slurm job array with one GPU per shard, and then merges the parts:
#
#   shards=$(sbatch --parsable embed-shards.sh RUN IMAGES vectors.parquet)
#   sbatch --dependency=afterok:"$shards" --wrap "shortlist embed RUN IMAGES -o vectors.parquet --merge"
#
# Run shards that failed again, here 3 and 5:  sbatch --array=3,5 embed-shards.sh RUN IMAGES vectors.parquet
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

shards=8 # the number of the whole array, also if only a part of it is run again
run=${1:?folder of the run} images=${2:?images} out=${3:?Parquet file}

exec shortlist embed "$run" "$images" --out "$out" --shard "$SLURM_ARRAY_TASK_ID/$shards"
