"""`p3o study probe`: what serving a checkpoint in a low precision costs, and which part costs it.

    precisions  names such as fp8-block:weights, and what they stand for
    inputs      from words to weights, prompts and sampling
    scorer      log-probs of given tokens, with any part of the model rounded
    parts       the parts that are rounded alone
    statistics  from log-ratios to metrics
    measure     samples, scores, metrics
    report      tables and JSON

Nothing is imported here, so that the command's words load without torch.
"""
