r"""Residual memory in a trained BERT of your own, on a text of your own.

MiniLM is a Hugging Face folder: in data/weights/, or any path. The text takes its vocabulary, and
the control has no memory. A BERT without masked-LM head gets a new one: its perplexity begins high.
To compare, fine-tune out/own_bert and MiniLM in the same way.

$ python prepare_data.py text own novels.txt --vocab data/weights/MiniLM
$ python pretrain.py configs/own_bert_resm.py --init_from=MiniLM
$ python pretrain.py configs/own_bert_resm.py --init_from=MiniLM --memory_layers= --out=out/own_bert
$ python measure.py table out/own_bert out/own_bert_resm --data own
$ python finetune.py configs/finetune_glue.py --init_from=out/own_bert_resm --task=SST-2 --seeds=3 \
      --lr=5e-5 --train_examples=2000 --epochs=2
"""
dataset = "own"
init_from = "MiniLM"  # brings layers, widths, heads and positions along
dropout = 0.1
seq_len = 32  # a new head learns sooner on short sequences; for long texts train on longer
batch_size = 32  # x 32 = 1,024 tokens a step
accumulation = 1
max_steps = 300  # x 1,024 = 0.3 million tokens: half of 3 MB of English
warmup_steps = 50
lr = 2e-4  # for a new head; 1e-5 keeps what a BERT with a head knows (results/minilm.md)
log_interval = 50
eval_interval = 100
eval_sequences = 256
checkpoint_interval = 100

memory_layers = (2, 4)  # of 6, counted from 1; (4, 8) of 12
alpha, beta = 1, 1  # x' = LN(x + FFN(x) + PKM(x))
init_values = "zero"  # the memory starts silent: at step 0 the model is the control
n_keys = 128  # 128 x 128 = 16,384 slots, for a small text
memory_heads = 4
topk = 16  # 4 x 16 = 64 slots read a token
key_dim = 256
value_lr = 1e-3  # constant
