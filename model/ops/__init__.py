"""One operation per file: a public function, its torch reference and (from the GPU issue on) its Triton kernel."""
