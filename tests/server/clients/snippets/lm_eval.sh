lm_eval run --model local-completions --tasks lambada_openai \
  --model_args model=nucleate-tiny,base_url=http://127.0.0.1:8000/v1/completions,tokenizer_backend=remote,num_concurrent=8
