"""From shards to a pretrained BERT: the model, its optimizer, its data order and the training program."""
