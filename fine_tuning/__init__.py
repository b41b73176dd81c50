"""From a pretrained encoder to task models: GLUE, SQuAD, NER and SWAG."""
