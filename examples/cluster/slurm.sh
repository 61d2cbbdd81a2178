#!/bin/bash
# A run on SLURM: sbatch examples/cluster/slurm.sh train my.toml run.name=first
# After a time limit or a crash: sbatch examples/cluster/slurm.sh resume runs/first
# The first node is the head and trains; the others generate. Edit the sizes below.
#SBATCH --job-name=penstock
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
set -euo pipefail

export RAY_AUTH_MODE=token # srun passes it to all nodes; others on the network are refused
RAY_AUTH_TOKEN=$(od -An -tx1 -N32 /dev/urandom | tr -d ' \n')
export RAY_AUTH_TOKEN
port=$((20000 + SLURM_JOB_ID % 10000))
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
address=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | awk '{print $1}')

# --overlap: the driver below runs beside these steps; srun ends them with the job
srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" \
    ray start --head --node-ip-address="$address" --port="$port" --labels="role=train" --block &
for node in "${nodes[@]:1}"; do
    srun --overlap --nodes=1 --ntasks=1 --nodelist="$node" \
        ray start --address="$address:$port" --labels="role=generate" --block &
done

# The run waits for the nodes itself
srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" \
    penstock "$@" \
    launch.kind=ray \
    launch.address="$address:$port" \
    launch.wait_for_nodes_s=600 \
    'launch.ray_options.consumers={num_gpus=1, label_selector={role="train"}}' \
    'launch.ray_options.producers={num_gpus=1, label_selector={role="generate"}}' \
    launch.num_consumers=8 \
    launch.num_producers=$((8 * (${#nodes[@]} - 1)))
