"""Whether this machine can train, and whether it can train a given run: `p3o doctor`.

    package_probe  imports one package in an interpreter of its own and says what it is
    system         reads the machine
    facts          what was read, as plain values
    software       findings about packages        hardware   findings about the machine
    topology       how GPUs are connected
    servers        what running SGLang servers answer
    run_facts      what else a run needs to know  run        findings about a run
    dry_run        one step in a temporary directory
    findings       a finding, and the exit code   report     table and JSON
    command        the command

Findings are pure functions of facts. Nothing here imports torch or Megatron: a package that is
broken, crashes or hangs does so in `package_probe`, and is a finding.
"""
