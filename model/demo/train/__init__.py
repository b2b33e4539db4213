"""The recipe of the demo network: its tokenizer, corpus and training stream, the trainer and the export."""
