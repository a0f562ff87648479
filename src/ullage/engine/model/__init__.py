"""The decoder that a spec configures: `decoder.Decoder` runs, `layer.Layer` is what it runs over.

Imports none of its modules: some of what they import needs one of them first, and `support` is
asked before torch is there.
"""
