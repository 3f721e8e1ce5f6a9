"""Texts of `tfring <command> --help` in addition to the options."""

from __future__ import annotations

LAUNCH_HELP = """\
Starts N workers of a program and joins them in a ring. The workers run on this machine, on other hosts over ssh
(--hosts, --hostfile, --hosts-from), or on the nodes of a SLURM allocation over srun.
"""

LAUNCH_DETAILS = """\
examples:
  tfring launch -n 4 train.py --epochs 3
  tfring launch -n auto --dry-run train.py
  tfring launch -n 2 --log-dir logs -m my_package.train
  tfring launch --hosts host1:4,host2:4 train.py
  salloc -N 2 -n 8 tfring launch train.py

hosts:
  --hosts host1:4,user@host2:4    hosts and their numbers of workers (default: 1)
  --hostfile FILE                 the same, one host per line; "host1 slots=4" is also accepted
  --hosts-from FILE               a program that prints the same; it runs again before each restart
  localhost and the name of this machine need no ssh. ssh never asks for a password: use keys, an agent or
  ~/.ssh/config. The program, the working directory and Python have the same paths on all hosts, unless --workdir and
  --python name others. Workers on other hosts receive the variables TFRING_*, TF_*, KERAS_*, OMP_*, XLA_*, NCCL_*,
  PYTHON*, CUDA_VISIBLE_DEVICES and those of --env, through the connection and never on a command line. They listen on
  the interface of --interface, at ports of --port-range.

options from a file:
  --config FILE reads options from a TOML file, by their names without dashes: max-restarts = 3, hosts = "host1:4",
  env = ["TOKEN"], timestamps = true. Without --config, options are read from the table [tool.tfring.launch] of
  pyproject.toml in this directory, if it exists. Options on the command line override those of the file; --env adds to
  them.

output:
  The output of rank 0 is passed on unchanged. Lines of other ranks begin with "[rank] "; their progress bars are left
  out. With --timestamps, lines of all ranks begin with the time and the rank. A warning that several ranks print is
  shown once and counted at the end. Standard input goes to rank 0: input() and pdb work there, and breakpoints of other
  ranks are ignored.

exit code:
  0 if all workers exit with 0. If a worker fails, the others are stopped, its error is printed last, and its exit code
  (128 + signal if it was killed) is returned. An error that several workers raise is shown once, with their ranks.
  Ctrl-C interrupts all workers; a second Ctrl-C kills them. No process that a worker started outlives the job, even if
  the launcher is killed. Exception: if the launcher and its child that watches the workers are killed at the same time,
  workers end but processes that they started may remain.

parameter servers:
  --servers S starts S more processes of the program. tfring.ParameterServerStrategy() serves parameters in them and
  ends them after the workers. Their lines begin with "[server 0] ". A failed server restarts, at most
  --max-server-restarts times, if it keeps snapshots (snapshot_dir); workers wait for it. A killed server also
  restarts if another server holds its shards (replicas=2); workers continue meanwhile. With --max-worker-restarts, a
  failed worker of asynchronous updates restarts and continues in the current epoch; the others do not wait for it. On
  several hosts, servers are placed on the hosts in turn, beginning with the first. There, a failed server ends the
  job, and workers do not restart.

restarts:
  With --max-restarts, a failure stops all workers and starts them again on new ports. A program that uses
  tfring.callbacks.Backup continues from its last backup. Exit code 75 means that a worker was preempted (SIGTERM) and
  has saved. With --hosts-from, each restart uses the hosts that are printed then, for --min-workers to --max-workers
  workers; it waits up to --start-timeout for enough of them. There is no restart after Ctrl-C, or after the same
  failure twice right after the start. Standard input goes to the first attempt only.

environment of a worker:
  TFRING_RANK, TFRING_WORLD_SIZE, TFRING_LOCAL_RANK, TFRING_LOCAL_WORLD_SIZE, TFRING_ADDRESSES,
  TFRING_LISTEN_FD
      its rank and the addresses of all ranks, which tfring.RingStrategy() reads.
  TFRING_SECRET
      the secret of the job, new for each run unless it or TFRING_SECRET_FILE is set.
  TFRING_RESTART, TFRING_DATA_SEED
      the number of restarts so far; with --max-restarts, a seed for shuffles without a seed, the same in every attempt.
  TFRING_SEED
      a new seed for each run, or that of --seed. Python's random, NumPy and shuffles of tf.data are seeded with it
      before the program starts, so arrays, splits and orders without a seed are the same on all ranks. The program
      does not see the variable.
  PYTHONHASHSEED=0
      unless set: sets of strings, such as a vocabulary, have the same order on all ranks.
  TF_NUM_INTRAOP_THREADS, TF_NUM_INTEROP_THREADS, OMP_NUM_THREADS
      unless set: the worker's share of the CPUs that the launcher may use.
  TF_CPP_MIN_LOG_LEVEL=1
      unless set, on all ranks but 0: TensorFlow's start messages are printed once.
  CUDA_VISIBLE_DEVICES
      one GPU per worker of a host, of those that the variable already names or that nvidia-smi lists; none for a
      server. Unchanged with TFRING_GPUS=all, and if a host has fewer GPUs than workers; a line warns of that.
  TF_FORCE_GPU_ALLOW_GROWTH=true
      unless set, if workers share GPUs: TensorFlow allocates memory as needed.
  PYTHONUNBUFFERED=1, PYTHONFAULTHANDLER=1, GLIBC_TUNABLES=glibc.malloc.hugetlb=1
      unless set; set them to nothing to turn them off. The last makes malloc ask for huge pages: without them, a step
      that allocates tensors of many MB spends half of its time in the kernel. Not set for more than 4 workers per CPU.
"""

DOCTOR_HELP = """\
Checks whether a cluster can train: inspects every host, connects every worker with every other one, measures how fast
they exchange data, and prints a verdict with each problem and its solution. The workers are numbered from 0; these
numbers are their ranks. Trains nothing and does not import TensorFlow.

where:
  With -n, --hosts or --hostfile the doctor starts all workers, as `tfring launch` does. Without options, it is one
  worker of the cluster that tfring.RingStrategy() would find, or alone: start it as you start your program, with
  mpirun, srun, or TF_CONFIG on every host. Rank 0 prints the report.

exit code:
  0 if the cluster is ready, else 1.
"""
DOCTOR_EXAMPLES = """\
examples:
  tfring doctor -n 2
  tfring doctor --hosts host1:4,host2:4
  mpirun -n 8 tfring doctor
  srun -n 8 tfring doctor --json
"""
BENCH_HELP = """\
Measures how fast the workers of a cluster exchange data. It times collectives, the operations that all workers call
together, such as all_reduce, which sums gradients in training. The columns are those of nccl-tests: time, size / time
(algbw), bytes per second on the slowest connection (busbw), and the share of what the machines reach without tfring in
the same run: by sockets between hosts, by copies of memory within a host. Uses NumPy and does not import TensorFlow.

where:
  -n, --hosts and --hostfile start the workers, as `tfring launch` does. Without them, start it with what starts your
  program, such as mpirun or srun.
"""
BENCH_EXAMPLES = """\
examples:
  tfring bench -n 4
  tfring bench --hosts host1:4,host2:4 --op all_reduce --sizes 4,64K,64M --plot bench.png
  mpirun -n 8 tfring bench --json
"""
TEST_HELP = """\
Trains a small model on all ranks for 60 steps, and the same model with the same batches on rank 0 alone. Prints rows
per second of both, and the difference of their weights. Run it first on a cluster that `tfring doctor` calls ready:
it uses TensorFlow, Keras and the GPUs, if any, in a complete training.

where:
  Start it as `tfring doctor`: with what starts your program, or with -n, --hosts or --hostfile.

exit code:
  0 if the weights equal those of one process up to rounding, else 1.
"""
TEST_EXAMPLES = """\
examples:
  tfring test -n 2
  tfring test --hosts host1:4,host2:4
  mpirun -n 8 tfring test
  srun -n 8 tfring test --json
"""
REPORT_HELP = """\
Says in a few sentences what a run did and what to look at: how long, how many steps a second, the share of
communication, a rank that is slow. Tables show how the ranks spend a step and who waits for whom: input, Python,
TensorFlow's start of a step, compute, waiting, sending and receiving, adding. Reads the files that each rank writes to
the directory of RingStrategy(trace="directory") or TFRING_TRACE. If each host has its own, copy them into one directory
first.

exit code:
  0, or 1 if the directory has no such files or those of different runs.
"""
REPORT_EXAMPLES = """\
examples:
  TFRING_TRACE=traces tfring launch -n 2 train.py && tfring report traces
  tfring report traces --trace trace.json       then open trace.json in https://ui.perfetto.dev
"""
COMPLETION_HELP = """\
Prints a script that lets a shell complete commands, options and files of tfring. Evaluate it when the shell starts.
"""
COMPLETION_EXAMPLES = """\
examples:
  echo 'eval "$(tfring completion bash)"' >> ~/.bashrc
  echo 'eval "$(tfring completion zsh)"' >> ~/.zshrc       (after compinit)
"""
