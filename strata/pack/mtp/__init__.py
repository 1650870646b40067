"""The forms a draft layer comes in: HF-named safetensors, the `rt` folder, the `nextn` block of a GGUF."""
