"""Turn a rollout into a training target: parse its token ids strictly, match its objects with the ground truth,
and build the corrected answer with a role for every token.

Everything here is a pure function of token ids, a vocabulary table and settings. Only `expand`, which adds
coordinate tokens to a checkpoint, imports torch. Import from the modules. A server needs only `table`: the bytes
and the meaning of every token id.
"""
