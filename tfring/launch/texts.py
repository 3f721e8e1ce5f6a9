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

The documentation describes hosts, output, exit codes and the variables of workers in docs/launcher.md, --servers in
docs/parameter_servers.md, and restarts in docs/restarts.md.
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
(algbw), bytes per second on the slowest connection (busbw), and the share of the speed that the machines reach without
tfring in the same run: by sockets between hosts, by copies of memory within a host. Uses NumPy and does not import
TensorFlow.

where:
  -n, --hosts and --hostfile start the workers, as `tfring launch` does. Without them, start it as you start your
  program, with mpirun or srun.
"""
BENCH_EXAMPLES = """\
examples:
  tfring bench -n 4
  tfring bench --hosts host1:4,host2:4 --op all_reduce --sizes 4,64K,64M --plot bench.png
  mpirun -n 8 tfring bench --json
"""
TEST_HELP = """\
Trains a small model on all ranks for 60 steps, and the same model with the same batches on rank 0 alone. Prints rows
per second of both, and the difference between their weights. Run it first on a cluster that `tfring doctor` calls
ready: it uses TensorFlow, Keras and the GPUs, if any, in a complete training.

where:
  Start it like `tfring doctor`: as you start your program, or with -n, --hosts or --hostfile.

exit code:
  0 if the weights equal those of one process up to rounding, 1 if not. If workers could not be started or ended early,
  that of `tfring launch`: 71 if a host cannot be reached (docs/launcher.md).
"""
TEST_EXAMPLES = """\
examples:
  tfring test -n 2
  tfring test --hosts host1:4,host2:4
  mpirun -n 8 tfring test
  srun -n 8 tfring test --json
"""
REPORT_HELP = """\
Describes in a few sentences what a run did and what to look at: its duration, steps per second, the share of
communication, a slow rank. Tables show how the ranks spend a step and who waits for whom: input, Python, the start of a
step in TensorFlow, compute, waiting, sending and receiving, adding. Reads the files that each rank writes to the
directory of RingStrategy(trace="directory") or TFRING_TRACE. If each host has its own, copy the files into one first.

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
