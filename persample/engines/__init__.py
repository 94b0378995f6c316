"""How the gradients of a chunk are computed: one function ``(call, required_ops) -> Gradients`` each."""
