"""Texts of `tfring <command> --help` in addition to the options."""

from __future__ import annotations

LAUNCH_HELP = """\
Starts N workers of a program, joined in a ring: on this machine; with --hosts, --hostfile or --hosts-from on others,
over ssh; in an allocation of SLURM on its nodes, over srun.

hosts:
  --hosts host1:4,user@host2:4    a host and how many workers it gets (1 if left out)
  --hostfile FILE                 the same, a host a line; "host1 slots=4" too
  --hosts-from FILE               the same, printed by this program, which is run again before each restart
  localhost, or this machine's name, needs no ssh. ssh never asks for anything: keys, an agent or ~/.ssh/config have to
  do. The program, the working folder and Python are at the same path on every host, or where --workdir and --python
  say. Of the environment workers elsewhere get TFRING_*, TF_*, KERAS_*, OMP_*, XLA_*, NCCL_*, PYTHON* and
  CUDA_VISIBLE_DEVICES, and what --env names, all sent through the connection and on no command line. They listen at
  ports of --port-range, of the interface that --interface names.

options from a file:
  --config FILE reads options from a file of TOML, by their names without dashes: max-restarts = 3, hosts = "host1:4",
  env = ["TOKEN"], timestamps = true. Without --config they come from the table [tool.tfring.launch] of pyproject.toml
  in this folder, if there is one. The command line wins; names of --env there are added.

output:
  Rank 0's is passed on as it is; of the other ranks whole lines are shown, "[rank] " in front, without
  their progress bars. With --timestamps lines of all ranks are shown so, the time in front.
  A warning of several ranks is shown once, and counted at the end. Standard input goes to
  rank 0: there input() and pdb work, others pass by a breakpoint.

ends:
  When all workers have ended with exit code 0, with 0. When one fails, the others are stopped, its error
  comes last, with the frames above, and its exit code (128 + signal if it was killed) is the launcher's.
  Ctrl-C interrupts all workers; a second one kills them. Nothing a worker has started outlives the job, here or
  elsewhere, even if the launcher is killed. Where its child, which watches the workers, is killed at the same time,
  the workers end, but not what they have started.

servers:
  With --servers S, S more processes of the program serve parameters: tfring.ParameterServerStrategy() serves there, and
  ends them when the workers are through. Their lines begin with "[server 0] ". A server that keeps snapshots
  (snapshot_dir) is started again in its place when it fails, at most --max-server-restarts times; workers wait for it.
  So is one whose shards another holds, too (replicas=2), when it is killed; workers go on with the other.
  With --max-worker-restarts a worker of asynchronous updates that fails is started again as well, and goes on in the
  epoch under way; the others do not wait for it. With --hosts, and in an allocation of SLURM, the hosts take servers in
  turn, the first one first, besides their workers; there a server that fails ends the job, and no worker comes back.

restarts:
  With --max-restarts, when a worker fails, all are stopped and started again, with new ports; a script that uses
  tfring.callbacks.Backup goes on from what it saved. A worker that ends with exit code 75 was preempted (SIGTERM) and
  has saved. With --hosts-from the next try starts on the hosts that are there then, --min-workers to --max-workers of
  them; too few are waited for, for --start-timeout. There is no restart after Ctrl-C, and none after the same failure
  twice at once. Standard input goes to the first try alone.

environment of a worker:
  TFRING_RANK, TFRING_WORLD_SIZE, TFRING_LOCAL_RANK, TFRING_LOCAL_WORLD_SIZE, TFRING_ADDRESSES,
  TFRING_LISTEN_FD
      its place in the ring; tfring.RingStrategy() reads them.
  TFRING_SECRET
      what the workers prove to each other; a new one for each run, unless it or TFRING_SECRET_FILE is set.
  TFRING_RESTART, TFRING_DATA_SEED
      how often the job was started before; with --max-restarts, unless set already, what shuffles without a seed
      begin with, the same in every try.
  TFRING_SEED
      drawn for each run, or that of --seed: Python's random, NumPy and tf.data's shuffles begin with it before the
      program does, so that arrays, splits and orders without a seed are one on all ranks. The program no longer sees
      the variable.
  PYTHONHASHSEED=0
      unless set already: a list made of a set of texts, such as a vocabulary, has one order on all ranks.
  TF_NUM_INTRAOP_THREADS, TF_NUM_INTEROP_THREADS, OMP_NUM_THREADS
      its share of the CPUs this process may use, unless set already.
  TF_CPP_MIN_LOG_LEVEL=1
      on other ranks than 0, unless set already: what TensorFlow says of itself is said once.
  CUDA_VISIBLE_DEVICES
      one GPU for each worker of a host, of those the variable names already, or nvidia-smi lists; none for a server.
      Left alone by TFRING_GPUS=all, and where a host has fewer GPUs than workers, which a line then warns of.
  TF_FORCE_GPU_ALLOW_GROWTH=true
      where workers share GPUs for that reason, unless set already: TensorFlow takes memory as it needs it.
  PYTHONUNBUFFERED=1, PYTHONFAULTHANDLER=1, GLIBC_TUNABLES=glibc.malloc.hugetlb=1
      unless set already (to nothing, to turn them off). The last has malloc ask for huge pages, where the kernel gives
      them to those who ask: a step that allocates tensors of many MB spends half its time in the kernel without. More
      than 4 workers a CPU do without: the kernel would clear 2 MB for each of their threads.
"""

LAUNCH_EXAMPLES = """\
examples:
  tfring launch -n 4 train.py --epochs 3
  tfring launch -n auto --dry-run train.py
  tfring launch -n 2 --log-dir logs -m my_package.train
  tfring launch --hosts host1:4,host2:4 train.py
  salloc -N 2 -n 8 tfring launch train.py
"""

DOCTOR_HELP = """\
Says whether a cluster can train: looks at every host and every way between two ranks, tries the ring, and ends in a
verdict, with each problem and what to do about it. Trains nothing, and imports no TensorFlow.

where:
  Alone, it is one rank of the cluster that tfring.RingStrategy() would find here: start it as you would your program,
  through mpirun or srun, or on every host with TF_CONFIG. With -n, --hosts or --hostfile it is started on every place,
  as by `tfring launch`. Rank 0 prints the report.

exit code:
  0 if the cluster is ready, 1 if not.
"""
DOCTOR_EXAMPLES = """\
examples:
  tfring doctor
  tfring doctor --hosts host1:4,host2:4
  mpirun -n 8 tfring doctor
  srun -n 8 tfring doctor --json
"""
BENCH_HELP = """\
Measures the collectives of a cluster, in the columns of nccl-tests: time, bytes of the size a second (algbw), bytes
that the slowest link carries a second (busbw), and its share of what the machines themselves take, measured in the
same run: a raw socket between hosts, a copy of memory within one. From NumPy; imports no TensorFlow.

where:
  Started as `tfring doctor` is: under whatever starts your program, or with -n, --hosts or --hostfile.
"""
BENCH_EXAMPLES = """\
examples:
  tfring bench -n 4
  tfring bench --hosts host1:4,host2:4 --op all_reduce --sizes 4,64K,64M --plot bench.png
  mpirun -n 8 tfring bench --json
"""
TEST_HELP = """\
Trains a small model on all ranks for 60 steps, and the same model on rank 0 alone with the same batches. Prints rows a
second of both, and by how much their weights differ. The first thing to run on a cluster that `tfring doctor` calls
ready: it takes TensorFlow, Keras and the GPUs, if there are any, through a whole training.

where:
  Started as `tfring doctor` is: under whatever starts your program, or with -n, --hosts or --hostfile.

exit code:
  0 if the weights are those of one process up to rounding, 1 if they differ or a rank cannot train.
"""
TEST_EXAMPLES = """\
examples:
  tfring test -n 2
  tfring test --hosts host1:4,host2:4
  mpirun -n 8 tfring test
"""
REPORT_HELP = """\
Says what the ranks of a run did in a step, and who waits for whom: input, Python, TensorFlow's start of a step,
compute, waiting, sending and receiving, adding. From the files that each rank writes into the folder of
RingStrategy(trace="folder") or TFRING_TRACE; where each host has its own, bring them into one folder.

exit code:
  0, or 1 if the folder has no such files, or those of different runs.
"""
REPORT_EXAMPLES = """\
examples:
  TFRING_TRACE=traces tfring launch -n 2 train.py && tfring report traces
  tfring report traces --trace trace.json       then open trace.json in https://ui.perfetto.dev
"""
COMPLETION_HELP = """\
Prints what makes a shell complete commands, options and files of tfring. Give it to the shell where it starts.
"""
COMPLETION_EXAMPLES = """\
examples:
  echo 'eval "$(tfring completion bash)"' >> ~/.bashrc
  echo 'eval "$(tfring completion zsh)"' >> ~/.zshrc       (behind compinit)
"""
