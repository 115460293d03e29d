"""Every config key, an edit of it, and the exact rules that the edit reruns."""

REPORT = {"report"}
CARD = {"card"}
EVAL = {"eval"} | CARD | REPORT
DPO = {"dpo"} | EVAL
REF = {"ref_logps"} | DPO
SFT = {"sft"} | REF
PACK = {"plan", "write", "pack"}
TOKENS = {"tokenize"} | PACK
PACK_SFT = PACK | SFT
TOKENIZER = {"tokenizer"} | TOKENS | SFT
CORPUS = {"corpus"} | TOKENIZER
PRETRAINED = {"path": "some/model"}
ROPE = {"type": "yarn", "factor": 4.0}
# A pretrained model brings its own tokenizer, so these edits begin there; that each key counts by itself: SINGLE, below.
ADOPTED = {"tokenizers.small": {"adopt": "some/model"}, "sft.run.base": PRETRAINED}
LORA = {"rank": 4}
MARKED = {
    "corpora.marked": {"kind": "unpaired", "sources": [{"files": ["data/preferences.jsonl"]}]}, "dpo.run.corpus": "marked",
    "dpo.run.loss": "kto",
}  # fmt: skip
CHANGE = {"one-row": {"training.micro_batch_rows": 1}}
ALPHA = {"dpo.run.f_divergence_type": "alpha_divergence"}
DRAWN = {"eval.both.generation.temperature": 0.5}
SHIPPED = {"names": ["arc_easy"]}
PUSHED = {"model": "dpo:run", "repository": "owner/name"}
MERGED = {"models": {"sft:run": 1, "dpo:run": 1}}
SAMPLED = {
    "model": "sft:run", "prompts": {"corpora": ["chat"], "limit": 6}, "responses": 2,
    "generation": {"temperature": 0.5, "max_new_tokens": 6}, "operation": {"gpus": 0},
}  # fmt: skip
SAMPLE = {"prompts", "generate", "sample"} | REPORT
SERVER = {"url": "http://localhost:1", "model": "tuned"}
PRICED = SERVER | {"price": {"prompt": 1.0, "completion": 2.0}, "limit_cost": 1.0, "limit_requests": 9}
CONTINUED = {
    "use_base": "sft:first", "corpus": "chat", "tokenizer": "small", "packing": {"length": 256},
    "training": {"epochs": 1, "batch_rows": 4, "micro_batch_rows": 2, "learning_rate": 0.002},
}  # fmt: skip

# Key → what the edit puts where (dotted paths into the micro config), and the rules that it reruns.
TABLE: dict[str, tuple[dict, set[str]]] = {
    "corpora": ({"corpora.more": {"kind": "conversations", "sources": [{"files": ["data/chat.jsonl"]}]}}, {"corpus"} | REPORT),
    "corpora.kind": ({"corpora.pairs.kind": "conversations", "dpo": {}, "eval": {}}, {"corpus", "tokenizer", "sft", "card", "report"} | TOKENS),
    "corpora.sources.files": ({"corpora.chat.sources.0.files": ["data/chat2.jsonl"]}, CORPUS),
    "corpora.sources.encoding": ({"corpora.chat.sources.0.encoding": "cp1252"}, CORPUS),
    "corpora.sources.delimiter": ({"corpora.chat.sources.0.delimiter": "tab"}, CORPUS),
    "corpora.sources.header": ({"corpora.chat.sources.0.header": ["prompt", "response"]}, CORPUS),
    "corpora.sources.hub.path": ({"corpora.chat.sources.0": {"hub": {"path": "a/b", "revision": "main"}}}, CORPUS),
    "corpora.sources.hub.name": ({"corpora.chat.sources.0": {"hub": {"path": "a/b", "name": "c", "revision": "main"}}}, CORPUS),
    "corpora.sources.hub.split": ({"corpora.chat.sources.0": {"hub": {"path": "a/b", "split": "test", "revision": "main"}}}, CORPUS),
    "corpora.sources.hub.revision": ({"corpora.chat.sources.0": {"hub": {"path": "a/b", "revision": "f00"}}}, CORPUS),
    "corpora.sources.layout": ({"corpora.chat.sources.0.layout": "messages"}, CORPUS),
    "corpora.sources.fields.system": ({"corpora.chat.sources.0.fields": {"system": "s"}}, CORPUS),
    "corpora.sources.fields.messages": ({"corpora.chat.sources.0.fields": {"messages": "m"}}, CORPUS),
    "corpora.sources.fields.history": ({"corpora.chat.sources.0.fields": {"history": "h"}}, CORPUS),
    "corpora.sources.fields.context_before": ({"corpora.chat.sources.0.fields": {"context_before": "c"}}, CORPUS),
    "corpora.sources.fields.choices": ({"corpora.chat.sources.0.fields": {"choices": ["c"]}}, CORPUS),
    "corpora.sources.fields.verdict": ({"corpora.pairs.sources.0.fields": {"prompt": "p", "answers": ["a", "b"], "verdict": "v"}}, CORPUS),
    "corpora.sources.fields.context": ({"corpora.chat.sources.0.fields": {"context": "c"}}, CORPUS),
    "corpora.sources.fields.reasoning": ({"corpora.chat.sources.0.fields": {"reasoning": "r"}}, CORPUS),
    "corpora.sources.fields.prompt": ({"corpora.chat.sources.0.fields": {"prompt": "p", "response": "r", "answer": "a"}}, CORPUS),
    "corpora.sources.fields.response": ({"corpora.chat.sources.0.fields": {"prompt": "p", "response": "s", "answer": "a"}}, CORPUS),
    "corpora.sources.fields.chosen": ({"corpora.pairs.sources.0.fields": {"prompt": "p", "chosen": "c", "rejected": "r"}}, CORPUS),
    "corpora.sources.fields.rejected": ({"corpora.pairs.sources.0.fields": {"prompt": "p", "chosen": "c", "rejected": "s"}}, CORPUS),
    "corpora.sources.fields.answers": ({"corpora.pairs.sources.0.fields": {"prompt": "p", "answers": ["a", "b"], "ratings": ["r", "s"]}}, CORPUS),
    "corpora.sources.fields.ratings": ({"corpora.pairs.sources.0.fields": {"prompt": "p", "answers": ["a", "b"], "ratings": ["s", "r"]}}, CORPUS),
    "corpora.sources.fields.label": ({"corpora.pairs.sources.0.fields": {"prompt": "p", "response": "r", "label": "l"}}, CORPUS),
    "corpora.sources.fields.conversation": ({"corpora.chat.sources.0.fields": {"conversation": "i", "role": "r", "content": "c"}}, CORPUS),
    "corpora.sources.fields.order": ({"corpora.chat.sources.0.fields": {"conversation": "i", "order": "o", "role": "r", "content": "c"}}, CORPUS),
    "corpora.sources.fields.role": ({"corpora.chat.sources.0.fields": {"conversation": "i", "role": "s", "content": "c"}}, CORPUS),
    "corpora.sources.fields.content": ({"corpora.chat.sources.0.fields": {"conversation": "i", "role": "r", "content": "d"}}, CORPUS),
    "corpora.sources.ignore": ({"corpora.chat.sources.0.ignore": ["notes"]}, CORPUS),
    "corpora.sources.frame.before": ({"corpora.chat.sources.0.frame": {"before": "b"}}, CORPUS),
    "corpora.sources.frame.after": ({"corpora.chat.sources.0.frame": {"after": "a"}}, CORPUS),
    "corpora.sources.frame.answer_end": ({"corpora.chat.sources.0.frame": {"answer_end": "e"}}, CORPUS),
    "corpora.sources.frame.system": ({"corpora.chat.sources.0.frame": {"system": "s"}}, CORPUS),
    "corpora.sources.fields.tools": ({"corpora.chat.sources.0.fields": {"tools": "functions"}}, CORPUS),
    "corpora.sources.fields.template_variables": ({"corpora.chat.sources.0.fields": {"template_variables": "v"}}, CORPUS),
    "corpora.sources.fields.weight": ({"corpora.chat.sources.0.fields": {"weight": "w"}}, CORPUS),
    "corpora.sources.template_variables": ({"corpora.chat.sources.0.template_variables": {"enable_thinking": False}}, CORPUS),
    "corpora.sources.fields.answer": ({"corpora.chat.sources.0.fields": {"answer": "task"}}, CORPUS),
    "corpora.sources.fields.task": ({"corpora.chat.sources.0.fields": {"task": "answer"}}, CORPUS),
    "corpora.sources.fields.text": ({"corpora.chat.kind": "text", "corpora.chat.sources.0.fields": {"text": "t"}, "eval.both.conversations": []}, CORPUS),
    "corpora.reasoning": ({"corpora.chat.reasoning": "last"}, TOKENS | SFT),
    "corpora.empty_reasoning": ({"corpora.chat.empty_reasoning": "omit"}, TOKENS | SFT),
    "corpora.order_column": ({"corpora.chat.order_column": "difficulty"}, CORPUS),
    "corpora.held_out": ({"corpora.chat.held_out": 0.3}, CORPUS),
    "corpora.split_seed": ({"corpora.pairs.split_seed": 1}, CORPUS),
    "corpora.answer_pattern": ({"corpora.chat.answer_pattern": "Answer: (.*)"}, CORPUS),
    "corpora.sources.speakers": ({"corpora.chat.sources.0.speakers": {"Agent": "assistant"}}, CORPUS),
    "corpora.sources.weight": ({"corpora.chat.sources.0.weight": 0.5}, CORPUS),
    "corpora.sources.where": ({"corpora.chat.sources.0.where": ["id != null"]}, CORPUS),
    "corpora.sources.margin": ({"corpora.pairs.sources.0.margin": 1.0}, CORPUS),
    "corpora.sources.pairing": ({"corpora.pairs.sources.0.pairing": "worst"}, CORPUS),
    "corpora.sources.max_rows": ({"corpora.chat.sources.0.max_rows": 50}, CORPUS),
    "corpora.repair": ({"corpora.chat.repair": ["drop-empty-turns"]}, CORPUS),
    "corpora.cleaning.fix_mojibake": ({"corpora.chat.cleaning": {"fix_mojibake": True}}, CORPUS),
    "corpora.cleaning.normalization": ({"corpora.chat.cleaning": {"normalization": "NFC"}}, CORPUS),
    "corpora.cleaning.mask_personal_data": ({"corpora.chat.cleaning": {"mask_personal_data": ["email"]}}, CORPUS),
    "corpora.cleaning.min_characters": ({"corpora.chat.cleaning": {"min_characters": 2}}, CORPUS),
    "corpora.cleaning.max_characters": ({"corpora.chat.cleaning": {"max_characters": 9000}}, CORPUS),
    "corpora.cleaning.drop_matching": ({"corpora.chat.cleaning": {"drop_matching": ["x{9}"]}}, CORPUS),
    "corpora.cleaning.languages": ({"corpora.chat.cleaning": {"languages": ["en"]}}, CORPUS),
    "corpora.near_duplicates.threshold": ({"corpora.chat.near_duplicates": {"threshold": 0.9}}, CORPUS),
    "corpora.near_duplicates.shingle": ({"corpora.chat.near_duplicates": {"shingle": 3}}, CORPUS),
    "corpora.near_duplicates.drop": ({"corpora.chat.near_duplicates": {"drop": False}}, CORPUS),
    "corpora.decontamination.ngram": ({"corpora.chat.decontamination": {"ngram": 9}}, CORPUS),
    # The same rows in other parts: Snakemake sees other files, and later stages reuse their results.
    "corpora.parts": ({"corpora.chat.parts": 2}, TOKENS | SFT),
    "corpora.license": ({"corpora.chat.license": "cc-by-4.0"}, CARD),
    "corpora.description": ({"corpora.chat.description": "Invented."}, CARD),
    "corpora.max_quarantined_fraction": ({"corpora.chat.max_quarantined_fraction": 0.5}, CORPUS),
    "tokenizers.train.corpora": ({"tokenizers.small.train.corpora": ["chat"]}, TOKENIZER),
    "tokenizers.train.model": ({"tokenizers.small.train.model": "unigram"}, TOKENIZER),
    "tokenizers.train.vocab_size": ({"tokenizers.small.train.vocab_size": 410}, TOKENIZER),
    "tokenizers.train.character_coverage": ({"tokenizers.small.train.character_coverage": 1.0}, TOKENIZER),
    "tokenizers.train.split_digits": ({"tokenizers.small.train.split_digits": False}, TOKENIZER),
    "tokenizers.adopt": (ADOPTED, TOKENIZER),
    "tokenizers.revision": (ADOPTED | {"tokenizers.small": {"adopt": "some/model", "revision": "f00"}}, TOKENIZER),
    "tokenizers.chat_template": ({"tokenizers.small.chat_template": "data/other.jinja"}, TOKENIZER),
    "eval.generation.template_variables": ({"eval.both.generation.template_variables": {"enable_thinking": False}}, EVAL),
    "tokenizers.template_date": ({"tokenizers.small.template_date": "2026-01-31"}, TOKENIZER),
    "tokenizers.on_template_error": ({"tokenizers.small.on_template_error": "fail"}, TOKENS | SFT),
    "sft.base.path": (ADOPTED, TOKENIZER),
    "sft.base.revision": (ADOPTED | {"sft.run.base": {**PRETRAINED, "revision": "f00"}}, TOKENIZER),
    "sft.base.trust_remote_code": (ADOPTED | {"sft.run.base": {**PRETRAINED, "trust_remote_code": True}}, TOKENIZER),
    "sft.base.rope.type": (ADOPTED | {"sft.run.base": {**PRETRAINED, "rope": {**ROPE, "type": "linear"}}}, TOKENIZER),
    "sft.base.rope.factor": (ADOPTED | {"sft.run.base": {**PRETRAINED, "rope": {**ROPE, "factor": 2.0}}}, TOKENIZER),
    "sft.base.rope.original_max_position_embeddings": (ADOPTED | {"sft.run.base": {**PRETRAINED, "rope": {**ROPE, "original_max_position_embeddings": 512}}}, TOKENIZER),
    "sft.base.architecture": ({"sft.run.base.architecture": "qwen2"}, SFT),
    "sft.base.hidden_size": ({"sft.run.base.hidden_size": 48}, SFT),
    "sft.base.intermediate_size": ({"sft.run.base.intermediate_size": 48}, SFT),
    "sft.base.layers": ({"sft.run.base.layers": 1}, SFT),
    "sft.base.heads": ({"sft.run.base.heads": 4}, SFT),
    "sft.base.key_value_heads": ({"sft.run.base.key_value_heads": 1}, SFT),
    "sft.base.tie_embeddings": ({"sft.run.base.tie_embeddings": False}, SFT),
    "sft.base.rope_theta": ({"sft.run.base.rope_theta": 500.0}, SFT),
    "sft.base.max_positions": ({"sft.run.base.max_positions": 512}, SFT),
    "sft.base.init_std": ({"sft.run.base.init_std": 0.05}, SFT),
    "sft.base.seed": ({"sft.run.base.seed": 1}, SFT),
    # Only the training moves to another corpus; the evaluation's own rows stay.
    "sft.corpus": ({"corpora.other": {"kind": "conversations", "sources": [{"files": ["data/chat2.jsonl"]}]}, "sft.run.corpus": "other"}, {"corpus"} | TOKENS | SFT),
    "sft.tokenizer": ({"tokenizers.other": {"train": {"corpora": ["chat"], "vocab_size": 400}}, "sft.run.tokenizer": "other"}, TOKENIZER),
    "sft.loss": ({"sft.run.loss": "dft"}, SFT),
    "sft.packing.length": ({"sft.run.packing.length": 128}, PACK_SFT),
    "sft.packing.strategy": ({"sft.run.packing.strategy": "none"}, PACK_SFT),
    "sft.packing.overflow": ({"sft.run.packing.overflow": "raise"}, PACK_SFT),
    "sft.packing.order": ({"sft.run.packing.order": "length"}, PACK_SFT),
    "sft.packing.train_on": ({"sft.run.packing.train_on": "last"}, TOKENS | SFT),
    "sft.lora.rank": (ADOPTED | {"sft.run.lora": LORA}, TOKENIZER),
    "sft.lora.alpha": (ADOPTED | {"sft.run.lora": {**LORA, "alpha": 8}}, TOKENIZER),
    "sft.lora.dropout": (ADOPTED | {"sft.run.lora": {**LORA, "dropout": 0.1}}, TOKENIZER),
    "sft.lora.target_modules": (ADOPTED | {"sft.run.lora": {**LORA, "target_modules": ["q_proj"]}}, TOKENIZER),
    "sft.lora.rslora": (ADOPTED | {"sft.run.lora": {**LORA, "rslora": True}}, TOKENIZER),
    "sft.lora.dora": (ADOPTED | {"sft.run.lora": {**LORA, "dora": True}}, TOKENIZER),
    "sft.lora.init_lora_weights": (ADOPTED | {"sft.run.lora": {**LORA, "init_lora_weights": "pissa"}}, TOKENIZER),
    "sft.lora.loraplus_lr_ratio": (ADOPTED | {"sft.run.lora": {**LORA, "loraplus_lr_ratio": 16}}, TOKENIZER),
    "sft.lora.modules_to_save": (ADOPTED | {"sft.run.lora": {**LORA, "modules_to_save": ["lm_head"]}}, TOKENIZER),
    "sft.lora.merge": (ADOPTED | {"sft.run.lora": {**LORA, "merge": False}}, TOKENIZER),
    # The run continues a current one, and everything made from it follows.
    "sft.use_base": ({"sft.first": "=sft.run", "sft.run": CONTINUED}, SFT),
    "sft.license": ({"sft.run.license": "mit"}, CARD),
    "sft.quantization.type": (ADOPTED | {"sft.run.lora": LORA, "sft.run.quantization": {"type": "fp4"}}, TOKENIZER),
    "sft.quantization.double": (ADOPTED | {"sft.run.lora": LORA, "sft.run.quantization": {"double": False}}, TOKENIZER),
    "dpo.from": ({"sft.other": "=sft.run", "dpo.run.from": "other"}, SFT),
    "dpo.corpus": ({"corpora.other": {"kind": "preferences", "sources": [{"files": ["data/preferences.jsonl"]}]}, "dpo.run.corpus": "other"}, {"corpus"} | TOKENS | REF),
    "dpo.packing.length": ({"dpo.run.packing.length": 200}, PACK | REF),
    "dpo.packing.order": ({"dpo.run.packing.order": "corpus"}, PACK | REF),
    "dpo.packing.overflow": ({"dpo.run.packing.overflow": "raise"}, PACK | REF),
    "dpo.loss": ({"dpo.run.loss": "ipo"}, DPO),
    "dpo.beta": ({"dpo.run.beta": 0.2}, DPO),
    "dpo.label_smoothing": ({"dpo.run.label_smoothing": 0.1}, DPO),
    "dpo.f_divergence_type": ({"dpo.run.f_divergence_type": "js_divergence"}, DPO),
    "dpo.f_alpha_divergence_coef": (ALPHA | {"dpo.run.f_alpha_divergence_coef": 0.3}, DPO),
    # It needs the reference's log-probabilities by token.
    "dpo.ld_alpha": ({"dpo.run.ld_alpha": 0.5}, REF),
    "dpo.discopop_tau": ({"dpo.run.loss": "discopop", "dpo.run.discopop_tau": 0.1}, DPO),
    # No reference is needed any more.
    "dpo.simpo_gamma": ({"dpo.run.loss": "simpo", "dpo.run.simpo_gamma": 1.0}, DPO),
    "dpo.cpo_alpha": ({"dpo.run.loss": "cpo", "dpo.run.cpo_alpha": 0.5}, DPO),
    "dpo.desirable_weight": (MARKED | {"dpo.run.desirable_weight": 2.0}, {"corpus"} | TOKENS | REF),
    "dpo.undesirable_weight": (MARKED | {"dpo.run.undesirable_weight": 2.0}, {"corpus"} | TOKENS | REF),
    "dpo.stop_if.margin_below": ({"dpo.run.stop_if": {"margin_below": 0.0}}, DPO),
    "dpo.stop_if.chosen_reward_below": ({"dpo.run.stop_if": {"chosen_reward_below": -1.0}}, DPO),
    "dpo.stop_if.kl_above": ({"dpo.run.stop_if": {"kl_above": 9.0}}, DPO),
    "dpo.stop_if.from_step": ({"dpo.run.stop_if": {"kl_above": 9.0, "from_step": 5}}, DPO),
    "dpo.stop_if.window": ({"dpo.run.stop_if": {"kl_above": 9.0, "window": 5}}, DPO),
    "dpo.reference.path": ({"dpo.run.reference": PRETRAINED}, REF),
    "dpo.reference.revision": ({"dpo.run.reference": {**PRETRAINED, "revision": "f00"}}, REF),
    "dpo.reference.trust_remote_code": ({"dpo.run.reference": {**PRETRAINED, "trust_remote_code": True}}, REF),
    "dpo.reference.rope.type": ({"dpo.run.reference": {**PRETRAINED, "rope": {**ROPE, "type": "linear"}}}, REF),
    "dpo.reference.rope.factor": ({"dpo.run.reference": {**PRETRAINED, "rope": {**ROPE, "factor": 2.0}}}, REF),
    "dpo.reference.rope.original_max_position_embeddings": ({"dpo.run.reference": {**PRETRAINED, "rope": {**ROPE, "original_max_position_embeddings": 512}}}, REF),
    # The gathered result exists; which parts it would be made from doesn't matter.
    "dpo.reference_pass.parts": ({"dpo.run.reference_pass": {"parts": 2}}, set()),
    "dpo.reference_pass.token_logps": ({"dpo.run.reference_pass": {"token_logps": True}}, REF),
    "dpo.reference_pass.share_kernels": ({"dpo.run.reference_pass": {"share_kernels": True}}, set()),
    # The reference must see the weights as the policy does: frozen ones have the data type of the computation. Where that is
    # float32, there is nothing to compute (test_references.py).
    "dpo.lora.rank": ({"dpo.run.lora": LORA}, REF),
    "dpo.lora.alpha": ({"dpo.run.lora": {**LORA, "alpha": 8}}, REF),
    "dpo.lora.dropout": ({"dpo.run.lora": {**LORA, "dropout": 0.1}}, REF),
    "dpo.lora.target_modules": ({"dpo.run.lora": {**LORA, "target_modules": ["q_proj"]}}, REF),
    "dpo.lora.rslora": ({"dpo.run.lora": {**LORA, "rslora": True}}, REF),
    "dpo.lora.dora": ({"dpo.run.lora": {**LORA, "dora": True}}, REF),
    "dpo.lora.init_lora_weights": ({"dpo.run.lora": {**LORA, "init_lora_weights": "pissa"}}, REF),
    "dpo.lora.loraplus_lr_ratio": ({"dpo.run.lora": {**LORA, "loraplus_lr_ratio": 16}}, REF),
    "dpo.lora.modules_to_save": ({"dpo.run.lora": {**LORA, "modules_to_save": ["lm_head"]}}, REF),
    "dpo.lora.merge": ({"dpo.run.lora": {**LORA, "merge": False}}, REF),
    "dpo.quantization.type": ({"dpo.run.lora": LORA, "dpo.run.quantization": {"type": "fp4"}}, REF),
    "dpo.quantization.double": ({"dpo.run.lora": LORA, "dpo.run.quantization": {"double": False}}, REF),
    # The run that it starts from has no card.
    "eval.models": ({"eval.both.models": ["base:run", "sft:run", "dpo:run"]}, {"eval"} | REPORT),
    "eval.conversations": ({"eval.both.conversations": []}, EVAL),
    "eval.preferences": ({"eval.both.preferences": []}, EVAL),
    "eval.packing.length": ({"eval.both.packing.length": 200}, PACK | EVAL),
    "eval.packing.overflow": ({"eval.both.packing.overflow": "raise"}, PACK | EVAL),
    "eval.packing.train_on": ({"eval.both.preferences": [], "eval.both.packing.train_on": "last"}, TOKENS | EVAL),
    "eval.exact_match.answer_pattern": ({"eval.both.exact_match.answer_pattern": "(.*)"}, EVAL),
    "eval.generation.max_new_tokens": ({"eval.both.generation.max_new_tokens": 7}, EVAL),
    "eval.exact_match.limit": ({"eval.both.exact_match.limit": 7}, EVAL),
    "eval.generation.batch_size": ({"eval.both.generation.batch_size": 7}, EVAL),
    # The likeliest token is written, and never drawn; each edit is of one of the settings of drawing besides.
    "eval.generation.temperature": ({"eval.both.generation.temperature": 0.5}, EVAL),
    "eval.generation.top_p": (DRAWN | {"eval.both.generation.top_p": 0.9}, EVAL),
    "eval.generation.top_k": (DRAWN | {"eval.both.generation.top_k": 9}, EVAL),
    "eval.generation.seed": (DRAWN | {"eval.both.generation.seed": 1}, EVAL),
    "eval.generation.repetition_penalty": ({"eval.both.generation.repetition_penalty": 1.1}, EVAL),
    "eval.generation.stop": ({"eval.both.generation.stop": ["x"]}, EVAL),
    "eval.tasks.folder": ({"eval.both.tasks": {"folder": "data/tasks", "names": ["t"]}}, EVAL),
    "eval.tasks.names": ({"eval.both.tasks": {"folder": "data/tasks", "names": ["u"]}}, EVAL),
    "eval.tasks.limit": ({"eval.both.tasks": {"folder": "data/tasks", "names": ["t"], "limit": 1}}, EVAL),
    "eval.tasks.batch_size": ({"eval.both.tasks": {"folder": "data/tasks", "names": ["t"], "batch_size": 1}}, EVAL),
    "eval.tasks.few_shot": ({"eval.both.tasks": {**SHIPPED, "few_shot": 2}}, EVAL),
    "eval.tasks.chat_template": ({"eval.both.tasks": {**SHIPPED, "chat_template": False}}, EVAL),
    "eval.tasks.few_shot_as_multiturn": ({"eval.both.tasks": {**SHIPPED, "few_shot_as_multiturn": False}}, EVAL),
    "eval.tasks.system_instruction": ({"eval.both.tasks": {**SHIPPED, "system_instruction": "Be brief."}}, EVAL),
    "eval.samples": ({"eval.both.samples": 3}, EVAL),
    # Nothing was made with other versions here.
    # Timings are a target of their own.
    "doctor.runs": ({"doctor": {"runs": ["dpo:run"]}}, set()),
    "doctor.changes": ({"doctor": {"changes": CHANGE}}, set()),
    "doctor.steps": ({"doctor": {"steps": 5}}, set()),
    "doctor.repeats": ({"doctor": {"repeats": 5}}, set()),
    # Checks are a target of their own, and shown where the config asks for it.
    "verify.rows": ({"verify": {"rows": 2}}, set()),
    "verify.report": ({"verify": {"report": True}}, REPORT | CARD),
    "reruns_on": ({"reruns_on": {"sft": "versions"}}, set()),
    "tracking.project": ({"tracking": {"project": "other"}}, set()),
    "tracking.tensorboard": ({"tracking": {"tensorboard": False}}, set()),
    "tracking.wandb.entity": ({"tracking": {"wandb": {"entity": "team"}}}, set()),
    "tracking.wandb.online": ({"tracking": {"wandb": {"online": True}}}, set()),
    "tracking.trackio": ({"tracking": {"trackio": True}}, set()),
    "tracking.mlflow.tracking_uri": ({"tracking": {"mlflow": {"tracking_uri": "sqlite:///runs.db"}}}, set()),
    "report.title": ({"report": {"title": "other"}}, REPORT),
    "report.note": ({"report": {"note": "other"}}, REPORT),
    "report.compare": ({"report": {"compare": ["results/dpo/run"]}}, REPORT),
    "report.sort_by": ({"report": {"sort_by": "preferences.pairs.reward_accuracy"}}, REPORT),
    # Nothing else reads a merged model that no evaluation names.
    "merge.models": ({"merge.soup": MERGED | {"models": {"sft:run": 2, "dpo:run": 1}}}, {"merge"}),
    "merge.method": ({"merge.soup": MERGED | {"method": "slerp"}}, {"merge"}),
    # Pushed models were made before, and `snakemake gguf` alone converts.
    "push.model": ({"push.run": PUSHED | {"model": "sft:run"}}, set()),
    "push.repository": ({"push.run": PUSHED | {"repository": "owner/other"}}, set()),
    "push.private": ({"push.run": PUSHED | {"private": False}}, set()),
    "push.branch": ({"push.run": PUSHED | {"branch": "v1"}}, set()),
    "gguf.model": ({"gguf.run": {"model": "sft:run"}}, {"convert"}),
    "gguf.type": ({"gguf.run": {"model": "sft:run", "type": "q8_0"}}, {"convert"}),
}  # fmt: skip
for section, reruns in (("sft", SFT), ("dpo", DPO)):
    for key, value in {
        "epochs": 2, "batch_rows": 8, "learning_rate": 0.5, "schedule": "linear", "schedule_options": {"num_cycles": 0.3}, "warmup_fraction": 0.5,
        "optimizer": "muon", "trainable": ".*proj.*", "weight_decay": 0.5, "betas": [0.8, 0.9], "max_grad_norm": 0.5,
        "precision": "float32", "compile": False, "deterministic": True, "save_dtype": "bfloat16", "seed": 7,
    }.items():  # fmt: skip
        # The data type can move a log-probability, so the reference follows it.
        shared = {"ref_logps"} if section == "dpo" and key == "precision" else set()
        TABLE[f"{section}.training.{key}"] = ({f"{section}.run.training.{key}": value}, reruns | shared)
    # The batch plan of a step shapes no result.
    for key, value in {"micro_batch_rows": 4, "gradient_checkpointing": True}.items():
        TABLE[f"{section}.training.{key}"] = ({f"{section}.run.training.{key}": value}, set())
    # Measurements of held-out rows shape a result only if they decide about it.
    for key, value in {"every": 0.5, "rows": 4, "samples": 1}.items():
        TABLE[f"{section}.training.evaluate.{key}"] = ({f"{section}.run.training.evaluate": {key: value}}, set())
    TABLE[f"{section}.training.average.ema"] = ({f"{section}.run.training.average": {"ema": 0.9}}, reruns)
    TABLE[f"{section}.training.until"] = ({f"{section}.run.training.until": 0.5}, reruns)
    # The run itself is current.
    TABLE[f"{section}.training.snapshots"] = ({f"{section}.run.training.snapshots": [0.5]}, {section} | CARD | REPORT)
    TABLE[f"{section}.training.keep"] = ({f"{section}.run.training.keep": "best"}, reruns)
    TABLE[f"{section}.training.stop_if.held_out_rises"] = (
        {f"{section}.run.training.stop_if": {"held_out_rises": 3}},
        reruns,
    )
    for key in ("gpus", "checkpoint_steps", "log_steps"):
        TABLE[f"{section}.operation.{key}"] = ({f"{section}.run.operation": {key: 2}}, set())
    for key in ("load_in_memory", "allow_cpu", "activation_offloading"):
        TABLE[f"{section}.operation.{key}"] = ({f"{section}.run.operation": {key: True}}, set())
    for key, operation in {
        "nodes": {"nodes": 2}, "launch": {"launch": "fsdp"}, "zero_stage": {"launch": "deepspeed", "zero_stage": 3}
    }.items():  # fmt: skip
        TABLE[f"{section}.operation.{key}"] = ({f"{section}.run.operation": operation}, set())
for section, metric in (("sft", "held_out_loss"), ("dpo", "logp_accuracy")):
    sweep = {"extends": "run", "grid": {"training.seed": [1, 2]}, "race": {"metric": metric, "rungs": [0.5]}}
    for key in ("metric", "keep", "tolerance", "rungs"):
        TABLE[f"{section}.race.{key}"] = ({f"{section}.sweep": sweep}, {section, "eval", "race"} | CARD | REPORT)
TABLE["sft.training.neftune_noise_alpha"] = ({"sft.run.training.neftune_noise_alpha": 5}, SFT)
TABLE["dpo.training.metric"] = ({"dpo.run.training.keep": "best", "dpo.run.training.metric": "margin"}, DPO)
# Each is a new sample, so all of its jobs run; that each key counts by itself: SINGLE, below.
SAMPLED_KEYS = {
    "model": "base:run", "prompts.corpora": ["chat", "pairs"], "prompts.split": "held_out", "prompts.limit": 5, "prompts.turns": "all",
    "prompts.longest": 50, "responses": 3, "generation.max_new_tokens": 7, "generation.temperature": 0.6, "generation.top_p": 0.9,
    "generation.top_k": 9, "generation.repetition_penalty": 1.1, "generation.seed": 1, "generation.stop": ["x"],
    "generation.batch_size": 7, "generation.template_variables": {"enable_thinking": False}, "operation.engine.url": SERVER,
    "operation.engine.model": SERVER, "operation.engine.key_variable": SERVER,
    "operation.engine.price.prompt": PRICED, "operation.engine.price.completion": PRICED,
    "operation.engine.limit_cost": PRICED, "operation.engine.limit_requests": PRICED, "operation.vllm": "data", "operation.gpus": 1,
    "operation.parts": 2,
}  # fmt: skip
for key in SAMPLED_KEYS:
    TABLE[f"sample.{key}"] = ({"sample.tries": SAMPLED}, SAMPLE)
# The engine of a finished evaluation doesn't matter.
SERVED = ("url", "model", "key_variable", "price.prompt", "price.completion", "limit_cost", "limit_requests")
for key in SERVED:
    TABLE[f"eval.operation.engine.{key}"] = ({"eval.both.operation": {"engine": PRICED}}, set())
TABLE["eval.operation.vllm"] = ({"eval.both.operation": {"engine": "vllm", "vllm": "data"}}, set())
# Refused in these sections, so there is nothing to rerun.
REFUSED = {
    "sft.training.metric",
    "dpo.training.neftune_noise_alpha",
    "dpo.packing.strategy",
    "dpo.packing.train_on",
    "eval.packing.strategy",
    "eval.packing.order",
}


# Keys that an edit above can't show alone: the config before, the key's new value, and the stages whose jobs differ.
SINGLE = {
    # What the list holds counts, and not where it is.
    "corpora.sources in a file": ({}, {"corpora.chat.sources": "data/sources.yaml"}, set()),
    "corpora.sources in another file": (
        {"corpora.chat.sources": "data/sources.yaml"}, {"corpora.chat.sources": "data/weighed.yaml"}, {"corpus"}
    ),
    "sft.base.revision": (ADOPTED, {"sft.run.base": {**PRETRAINED, "revision": "f00"}}, {"sft"}),
    "sft.base.trust_remote_code": (ADOPTED, {"sft.run.base.trust_remote_code": True}, {"sft", "ref_logps", "dpo", "eval"}),
    "sft.base.rope": (ADOPTED, {"sft.run.base.rope": ROPE}, {"sft"}),
    "sft.base.rope.type": (ADOPTED | {"sft.run.base": {**PRETRAINED, "rope": ROPE}}, {"sft.run.base.rope.type": "linear"}, {"sft"}),
    "sft.base.rope.factor": (ADOPTED | {"sft.run.base": {**PRETRAINED, "rope": ROPE}}, {"sft.run.base.rope.factor": 2.0}, {"sft"}),
    "sft.base.rope.original_max_position_embeddings": (
        ADOPTED | {"sft.run.base": {**PRETRAINED, "rope": ROPE}}, {"sft.run.base.rope.original_max_position_embeddings": 512}, {"sft"}
    ),
    "sft.lora": (ADOPTED, {"sft.run.lora": LORA}, {"sft"}),
    "sft.lora.rank": (ADOPTED | {"sft.run.lora": LORA}, {"sft.run.lora.rank": 5}, {"sft"}),
    "sft.lora.alpha": (ADOPTED | {"sft.run.lora": LORA}, {"sft.run.lora.alpha": 5}, {"sft"}),
    "sft.lora.dropout": (ADOPTED | {"sft.run.lora": LORA}, {"sft.run.lora.dropout": 0.5}, {"sft"}),
    "sft.lora.target_modules": (ADOPTED | {"sft.run.lora": LORA}, {"sft.run.lora.target_modules": ["q"]}, {"sft"}),
    "sft.lora.rslora": (ADOPTED | {"sft.run.lora": LORA}, {"sft.run.lora.rslora": True}, {"sft"}),
    "sft.lora.dora": (ADOPTED | {"sft.run.lora": LORA}, {"sft.run.lora.dora": True}, {"sft"}),
    "sft.lora.modules_to_save": (ADOPTED | {"sft.run.lora": LORA}, {"sft.run.lora.modules_to_save": ["norm"]}, {"sft"}),
    # Readers of the model get its base layers too.
    "sft.lora.merge": (ADOPTED | {"sft.run.lora": LORA}, {"sft.run.lora.merge": False}, {"sft", "ref_logps", "dpo", "eval"}),
    "sft.use_base": ({"sft.first": "=sft.run", "sft.other": "=sft.run", "sft.run": CONTINUED}, {"sft.run.use_base": "sft:other"}, set()),
    "sft.quantization": (ADOPTED | {"sft.run.lora": LORA}, {"sft.run.quantization": {}}, {"sft"}),
    "sft.quantization.type": (
        ADOPTED | {"sft.run.lora": LORA, "sft.run.quantization": {}}, {"sft.run.quantization.type": "fp4"}, {"sft"}
    ),
    "sft.quantization.double": (
        ADOPTED | {"sft.run.lora": LORA, "sft.run.quantization": {}}, {"sft.run.quantization.double": False}, {"sft"}
    ),
    "dpo.loss": ({}, {"dpo.run.loss": {"sigmoid": 0.8, "bco_pair": 0.2}}, {"dpo"}),
    "dpo.f_alpha_divergence_coef": (ALPHA, {"dpo.run.f_alpha_divergence_coef": 0.3}, {"dpo"}),
    "dpo.ld_alpha": ({"dpo.run.ld_alpha": 0.5}, {"dpo.run.ld_alpha": 0.3}, {"dpo"}),
    "dpo.discopop_tau": ({"dpo.run.loss": "discopop"}, {"dpo.run.discopop_tau": 0.1}, {"dpo"}),
    "dpo.simpo_gamma": ({"dpo.run.loss": "simpo"}, {"dpo.run.simpo_gamma": 1.0}, {"dpo"}),
    "dpo.cpo_alpha": ({"dpo.run.loss": "cpo"}, {"dpo.run.cpo_alpha": 0.5}, {"dpo"}),
    "dpo.desirable_weight": (MARKED, {"dpo.run.desirable_weight": 2.0}, {"dpo"}),
    "dpo.undesirable_weight": (MARKED, {"dpo.run.undesirable_weight": 2.0}, {"dpo"}),
    "dpo.stop_if.from_step": ({"dpo.run.stop_if": {"kl_above": 9.0}}, {"dpo.run.stop_if.from_step": 5}, {"dpo"}),
    "dpo.stop_if.window": ({"dpo.run.stop_if": {"kl_above": 9.0}}, {"dpo.run.stop_if.window": 5}, {"dpo"}),
    "dpo.lora": (
        ADOPTED | {"sft.run.lora": LORA, "dpo.run.lora": LORA}, {"dpo.run.lora": "continued"}, {"ref_logps", "dpo"}
    ),
    "dpo.reference_pass.parts": ({}, {"dpo.run.reference_pass": {"parts": 3}}, set()),
    "dpo.lora.rank": ({"dpo.run.lora": LORA}, {"dpo.run.lora.rank": 5}, {"dpo"}),
    "dpo.lora.alpha": ({"dpo.run.lora": LORA}, {"dpo.run.lora.alpha": 5}, {"dpo"}),
    "dpo.lora.dora": ({"dpo.run.lora": LORA}, {"dpo.run.lora.dora": True}, {"dpo"}),
    "dpo.lora.rslora": ({"dpo.run.lora": LORA}, {"dpo.run.lora.rslora": True}, {"dpo"}),
    "dpo.lora.modules_to_save": ({"dpo.run.lora": LORA}, {"dpo.run.lora.modules_to_save": ["norm"]}, {"dpo"}),
    "dpo.lora.merge": ({"dpo.run.lora": LORA}, {"dpo.run.lora.merge": False}, {"dpo"}),
    "eval.generation.top_p": (DRAWN, {"eval.both.generation.top_p": 0.9}, {"eval"}),
    "eval.generation.top_k": (DRAWN, {"eval.both.generation.top_k": 9}, {"eval"}),
    "eval.generation.seed": (DRAWN, {"eval.both.generation.seed": 1}, {"eval"}),
    "eval.tasks.names": ({"eval.both.tasks": SHIPPED}, {"eval.both.tasks.names": ["arc_challenge"]}, {"eval"}),
    "eval.tasks.few_shot": ({"eval.both.tasks": SHIPPED}, {"eval.both.tasks.few_shot": 2}, {"eval"}),
    "eval.tasks.chat_template": ({"eval.both.tasks": SHIPPED}, {"eval.both.tasks.chat_template": False}, {"eval"}),
    "eval.tasks.few_shot_as_multiturn": (
        {"eval.both.tasks": SHIPPED}, {"eval.both.tasks.few_shot_as_multiturn": False}, {"eval"}
    ),
    "eval.tasks.system_instruction": ({"eval.both.tasks": SHIPPED}, {"eval.both.tasks.system_instruction": "x"}, {"eval"}),
}  # fmt: skip
CHECKED = {"samples": "tries", "by": {"answer": {"pattern": "(.*)"}}}
CALLED = {"samples": "tries", "by": {"python": "data/chat.jsonl"}}
for key, edit in {
    "samples": CHECKED, "by.answer.pattern": CHECKED, "by.python": CALLED, "by.seconds": CALLED,
}.items():  # fmt: skip
    TABLE[f"score.{key}"] = ({"sample.tries": SAMPLED, "score.worth": edit}, SAMPLE | {"score"})
TABLE["score.by.sum"] = (
    {"sample.tries": SAMPLED, "score.worth": CHECKED, "score.all": {"samples": "tries", "by": {"sum": {"worth": 2.0}}}},
    SAMPLE | {"score"},
)
# The parts of a table that isn't finished are those of one engine; a finished one counts neither engine nor parts.
CHANGED_BY = {
    "prompts": {"prompts"}, "generation.max_new_tokens": {"prompts", "generate", "sample"}, "generation.batch_size": {"generate"},
    "generation.template_variables": {"prompts"}, "operation.engine": {"generate"}, "operation.vllm": set(), "operation.gpus": set(),
    "operation.parts": {"generate"},
}  # fmt: skip
for key, value in SAMPLED_KEYS.items():
    section = key.partition(".")[0]
    engine = key.startswith("operation.engine")
    changed = CHANGED_BY.get("operation.engine" if engine else key, CHANGED_BY.get(section, {"generate", "sample"}))
    edit = {f"sample.tries.{'operation.engine' if engine else key}": value}
    SINGLE[f"sample.{key}"] = ({"sample.tries": SAMPLED}, edit, changed)
COUNTED = {"sample.tries": SAMPLED, "reruns_on": {"sample": "versions"}}
SINGLE["sample.operation.engine with versions"] = (
    COUNTED,
    {"sample.tries.operation.engine": SERVER},
    {"generate", "sample"},
)
BOTH = {"sample.tries": SAMPLED, "sample.again": SAMPLED, "score.worth": CHECKED, "score.called": CALLED}
SUMMED = BOTH | {"score.all": {"samples": "tries", "by": {"sum": {"worth": 2.0, "called": 1.0}}}}
SINGLE |= {
    "score.samples": (BOTH, {"score.worth.samples": "again"}, set()),
    "score.by.answer.pattern": (BOTH, {"score.worth.by.answer.pattern": "a(.*)"}, {"score"}),
    "score.by.python": (BOTH, {"score.called.by.python": "data/preferences.jsonl"}, set()),
    "score.by.seconds": (BOTH, {"score.called.by.seconds": 3}, {"score"}),
    "score.by.sum": (SUMMED, {"score.all.by.sum.worth": 3.0}, {"score"}),
}  # fmt: skip
# Rows of scored responses: a corpus of its own, whose jobs all run.
WORTH = {"sample.tries": SAMPLED, "score.worth": CHECKED}
OWN = SAMPLE | {"score", "select", "corpus"}
for key, kind, source in (
    ("scores", "preferences", {"pairs": "best-worst"}),
    ("pairs", "preferences", {"pairs": "best-worst"}),
    ("per_prompt", "preferences", {"pairs": "best-worst", "per_prompt": 2}),
    ("rows", "conversations", {"rows": "best"}),
    ("at_least", "conversations", {"rows": "best", "at_least": 1.0}),
    ("good_from", "unpaired", {"good_from": 1.0, "bad_to": 0.0}),
    ("bad_to", "unpaired", {"good_from": 1.0, "bad_to": 0.0}),
):
    own = {"kind": kind, "sources": [{"scores": "worth", **source}]}
    TABLE[f"corpora.sources.{key}"] = (WORTH | {"corpora.own": own}, OWN)
PAIRED = WORTH | {"corpora.own": {"kind": "preferences", "sources": [{"scores": "worth", "pairs": "best-worst"}]}}
VOTED = WORTH | {"corpora.own": {"kind": "unpaired", "sources": [{"scores": "worth", "good_from": 1.0, "bad_to": 0.0}]}}
BEST = WORTH | {"corpora.own": {"kind": "conversations", "sources": [{"scores": "worth", "rows": "best"}]}}
SINGLE |= {
    "corpora.sources.margin of scores": (PAIRED, {"corpora.own.sources.0.margin": 0.5}, {"select", "corpus"}),
    "corpora.sources.per_prompt": (PAIRED, {"corpora.own.sources.0.per_prompt": 2}, {"select", "corpus"}),
    "corpora.sources.rows": (BEST, {"corpora.own.sources.0.rows": "all"}, {"select", "corpus"}),
    "corpora.sources.at_least": (BEST, {"corpora.own.sources.0.at_least": 1.0}, {"select", "corpus"}),
    "corpora.sources.good_from": (VOTED, {"corpora.own.sources.0.good_from": 0.9}, {"select", "corpus"}),
    "corpora.sources.bad_to": (VOTED, {"corpora.own.sources.0.bad_to": 0.1}, {"select", "corpus"}),
}  # fmt: skip
# Judges: of the responses of a sample, and of the pairs of an evaluation.
JUDGE = {"engine": PRICED, "rubric": "data/chat.jsonl"}
OWN_JUDGE = {"model": "sft:run", "rubric": "data/chat.jsonl"}
JUDGED = {"sample.tries": SAMPLED, "score.worth": {"samples": "tries", "by": {"judge": JUDGE}}}
OWN_JUDGED = {"sample.tries": SAMPLED, "score.worth": {"samples": "tries", "by": {"judge": OWN_JUDGE}}}
COMPARED = {"eval.both.judge": JUDGE | {"against": "sft:run"}}
OWN_COMPARED = {"eval.both.judge": OWN_JUDGE | {"against": "sft:run"}}
for key in SERVED:
    TABLE[f"score.by.judge.engine.{key}"] = (JUDGED, SAMPLE | {"judge"})
    TABLE[f"eval.judge.engine.{key}"] = (COMPARED, EVAL | {"compare"})
for key in ("rubric", "max_new_tokens", "model", "batch_size", "vllm"):
    TABLE[f"score.by.judge.{key}"] = (OWN_JUDGED, SAMPLE | {"judge"})
    TABLE[f"eval.judge.{key}"] = (OWN_COMPARED, EVAL | {"compare"})
for key in ("scale", "pattern", "json_reply"):
    TABLE[f"score.by.judge.{key}"] = (OWN_JUDGED, SAMPLE | {"judge"})
for key in ("against", "prompts"):
    TABLE[f"eval.judge.{key}"] = (COMPARED, EVAL | {"compare"})
# Neither address, prices and limits nor where vLLM is: replies that were paid for stay.
for key, value, changed in (
    ("engine.url", "http://localhost:2", set()),
    ("engine.price.prompt", 3.0, set()),
    ("engine.limit_requests", 8, set()),
    ("engine.limit_cost", 2.0, set()),
    ("engine.model", "other", {"judge"}),
    ("max_new_tokens", 5, {"judge"}),
    ("rubric", "data/preferences.jsonl", set()),
):
    SINGLE[f"score.by.judge.{key}"] = (JUDGED, {f"score.worth.by.judge.{key}": value}, changed)
    compared = {"compare"} if changed else set()
    SINGLE[f"eval.judge.{key}"] = (COMPARED, {f"eval.both.judge.{key}": value}, compared)
SINGLE |= {
    "score.by.judge.scale": (JUDGED, {"score.worth.by.judge.scale": [0, 1]}, {"judge"}),
    "score.by.judge.pattern": (JUDGED, {"score.worth.by.judge.pattern": "(.)"}, {"judge"}),
    "score.by.judge.json_reply": (JUDGED, {"score.worth.by.judge.json_reply": True}, {"judge"}),
    "score.by.judge.model": (OWN_JUDGED, {"score.worth.by.judge.model": "dpo:run"}, {"judge"}),
    "eval.judge.prompts": (COMPARED, {"eval.both.judge.prompts": 3}, {"eval", "compare"}),
    "eval.judge.against": (COMPARED, {"eval.both.judge.against": "dpo:run"}, {"compare"}),
}  # fmt: skip
REWARDED = {"sample.tries": SAMPLED, "score.worth": {"samples": "tries", "by": {"reward": {"path": "some/model"}}}}
for key, value in {"path": "other/model", "revision": "v1", "trust_remote_code": True, "batch_size": 2}.items():
    TABLE[f"score.by.reward.{key}"] = (REWARDED, SAMPLE | {"rate"})
    SINGLE[f"score.by.reward.{key}"] = (REWARDED, {f"score.worth.by.reward.{key}": value}, {"rate"})
TABLE["eval.kl_from"] = ({"eval.both.kl_from": "sft:run"}, EVAL)
# Rounds: entries of their own, whose jobs all run. What each key changes is that of the sections that it expands to.
ANSWERED = {"answer": {"pattern": "(.*)"}}
OF_ROUNDS = {
    "rounds": 2, "sample": {key: value for key, value in SAMPLED.items() if key != "model"}, "score": {"by": ANSWERED},
    "training": {"epochs": 1, "batch_rows": 4, "micro_batch_rows": 2, "learning_rate": 0.002},
}  # fmt: skip
SFT_ROUNDS = OF_ROUNDS | {"use_base": "sft:run", "corpus": "chat", "tokenizer": "small", "rows": {"rule": "best"}}
DPO_ROUNDS = OF_ROUNDS | {"from": "run", "pairs": {"rule": "best-worst"}, "mix": {"pairs": 0.5}}
ALL_OF_ROUND = SAMPLE | {"score", "select", "corpus", "card"} | TOKENS
SFT_ROUND, DPO_ROUND = ALL_OF_ROUND | {"sft"}, ALL_OF_ROUND | {"dpo", "ref_logps"}
for key in ("rounds", "sample", "score", "rows.rule", "rows.at_least", "rows.min_rows"):
    TABLE[f"sft.{key}"] = ({"sft.self": SFT_ROUNDS}, SFT_ROUND)
for key in ("rounds", "sample", "score", "pairs.rule", "pairs.margin", "pairs.per_prompt", "pairs.min_rows", "mix"):
    TABLE[f"dpo.{key}"] = ({"dpo.self": DPO_ROUNDS}, DPO_ROUND)
SINGLE |= {
    "sft.rounds": ({"sft.self": SFT_ROUNDS}, {"sft.self.rounds": [{}, {"training.epochs": 2}]}, {"sft"}),
    "sft.rows.at_least": ({"sft.self": SFT_ROUNDS}, {"sft.self.rows.at_least": 1.0}, {"select", "corpus"}),
    "sft.rows.min_rows": ({"sft.self": SFT_ROUNDS}, {"sft.self.rows.min_rows": 1}, {"select", "corpus"}),
    "sft.sample.responses": ({"sft.self": SFT_ROUNDS}, {"sft.self.sample.responses": 3}, {"generate", "sample"}),
    "sft.sample.prompts.limit": ({"sft.self": SFT_ROUNDS}, {"sft.self.sample.prompts.limit": 5}, {"prompts"}),
    "sft.score.by.answer": ({"sft.self": SFT_ROUNDS}, {"sft.self.score.by.answer.pattern": "a(.*)"}, {"score"}),
    "dpo.rounds": ({"dpo.self": DPO_ROUNDS}, {"dpo.self.rounds": [{}, {"beta": 0.3}]}, {"dpo"}),
    "dpo.pairs.margin": ({"dpo.self": DPO_ROUNDS}, {"dpo.self.pairs.margin": 0.5}, {"select", "corpus"}),
    "dpo.mix": ({"dpo.self": DPO_ROUNDS}, {"dpo.self.mix.pairs": 0.3}, {"corpus"}),
    "dpo.from": ({"dpo.other": "=dpo.run", "dpo.last": "=dpo.run"}, {"dpo.last.from": "dpo:other"}, set()),
    "dpo.reference": ({"dpo.other": "=dpo.run"}, {"dpo.run.reference": "dpo:other"}, {"dpo"}),
    "sample.prompts.skip": ({"sample.tries": SAMPLED}, {"sample.tries.prompts.skip": 3}, {"prompts"}),
    "corpora.sources.min_rows": (BEST, {"corpora.own.sources.0.min_rows": 1}, {"select", "corpus"}),
}  # fmt: skip
EARLIER = {
    "sample.first": SAMPLED, "score.worth": CHECKED | {"samples": "first"},
    "sample.tries": SAMPLED | {"prompts": {"corpora": ["chat"], "limit": 6, "scored": ["worth"], "solved": 0.5, "unsolved": 0.5}},
}  # fmt: skip
TABLE["sample.prompts.skip"] = (
    {"sample.tries": SAMPLED | {"prompts": {"corpora": ["chat"], "limit": 6, "skip": 6}}},
    SAMPLE,
)
for key in ("solved", "unsolved"):
    SINGLE[f"sample.prompts.{key}"] = (EARLIER, {f"sample.tries.prompts.{key}": 0.0}, {"prompts"})
for key in ("scored", "solved", "unsolved"):
    TABLE[f"sample.prompts.{key}"] = (EARLIER, SAMPLE | {"score"})
TABLE["corpora.sources.min_rows"] = (
    WORTH | {"corpora.own": {"kind": "conversations", "sources": [{"scores": "worth", "rows": "best", "min_rows": 1}]}},
    OWN,
)
# Reward models: a new run each time, on the rows that the DPO run has; that each key counts by itself: SINGLE.
REWARD = {"reward"} | CARD | REPORT
TRAINED = {"reward.run": "=dpo.run"}
LIKED = TRAINED | {"sample.tries": SAMPLED}
LIKED |= {"score.worth": {"samples": "tries", "by": {"reward": {"model": "reward:run"}}}}
TABLE["score.by.reward.model"] = (LIKED, SAMPLE | REWARD | {"rate"})
SINGLE["score.by.reward.model"] = (
    LIKED | {"reward.other": "=dpo.run"}, {"score.worth.by.reward.model": "reward:other"}, set()
)  # fmt: skip
TABLE["reward.from"] = TABLE["reward.corpus"] = (TRAINED, REWARD)
for key, value in {"center_rewards_coefficient": 0.01, "margin": True}.items():
    TABLE[f"reward.{key}"] = (TRAINED | {f"reward.run.{key}": value}, REWARD)
    SINGLE[f"reward.{key}"] = (TRAINED, {f"reward.run.{key}": value}, {"reward"})
for key, value in {"length": 200, "order": "corpus", "overflow": "raise"}.items():
    TABLE[f"reward.packing.{key}"] = (TRAINED | {f"reward.run.packing.{key}": value}, PACK | REWARD)
OF_ADAPTERS = {
    "rank": 5, "alpha": 8, "dropout": 0.1, "target_modules": ["q_proj"], "rslora": True, "dora": True,
    "init_lora_weights": "pissa", "loraplus_lr_ratio": 16, "modules_to_save": ["norm"],
}  # fmt: skip
for key, value in OF_ADAPTERS.items():
    TABLE[f"reward.lora.{key}"] = (TRAINED | {"reward.run.lora": {**LORA, key: value}}, REWARD)
    SINGLE[f"reward.lora.{key}"] = (
        TRAINED | {"reward.run.lora": LORA}, {f"reward.run.lora.{key}": value}, {"reward"}
    )  # fmt: skip
for key, value in {"type": "fp4", "double": False}.items():
    quantized = {"reward.run.lora": LORA, "reward.run.quantization": {key: value}}
    TABLE[f"reward.quantization.{key}"] = (TRAINED | quantized, REWARD)
# The keys that all trainings have: those of `dpo:`, whose edits are of the same values.
for key in [key for key in TABLE if key.startswith(("dpo.training.", "dpo.operation."))]:
    edit = {name.replace("dpo.run", "reward.run"): value for name, value in TABLE[key][0].items()}
    shared = key.removeprefix("dpo.")
    TABLE[f"reward.{shared}"] = (TRAINED | edit, REWARD)
    shapes = {"reward"} if "dpo" in TABLE[key][1] and shared != "training.snapshots" else set()
    SINGLE[f"reward.{shared}"] = (TRAINED, edit, shapes)
REFUSED |= {
    "reward.packing.strategy",
    "reward.packing.train_on",
    "reward.training.neftune_noise_alpha",
    "reward.lora.merge",
}
# A teacher: an equal run teaches the one of the micro config.
TAUGHT = {"sft.big": "=sft.run", "teacher.big": {"model": "sft:big"}, "sft.run.distill": {"teacher": "big"}}
TEACHER = {"teacher"} | SFT
TABLE["sft.distill.teacher"] = (TAUGHT, TEACHER)
SINGLE["sft.distill.teacher"] = (
    TAUGHT | {"teacher.other": "=teacher.big"}, {"sft.run.distill.teacher": "other"}, {"teacher"}
)  # fmt: skip
for key, value in {"k": 8, "precision": "bfloat16"}.items():
    TABLE[f"teacher.{key}"] = (TAUGHT | {f"teacher.big.{key}": value}, TEACHER)
    SINGLE[f"teacher.{key}"] = (TAUGHT, {f"teacher.big.{key}": value}, {"teacher"})
for key, value in {"type": "fp4", "double": False}.items():
    TABLE[f"teacher.quantization.{key}"] = (TAUGHT | {"teacher.big.quantization": {key: value}}, TEACHER)
    SINGLE[f"teacher.quantization.{key}"] = (
        TAUGHT | {"teacher.big.quantization": {}}, {f"teacher.big.quantization.{key}": value}, {"teacher"}
    )  # fmt: skip
for key, value in {"gpus": 0, "allow_cpu": True, "parts": 2}.items():
    TABLE[f"teacher.operation.{key}"] = (TAUGHT | {"teacher.big.operation": {key: value}}, TEACHER)
    SINGLE[f"teacher.operation.{key}"] = (TAUGHT, {f"teacher.big.operation.{key}": value}, set())
for key, value in {"weight": 0.9, "temperature": 2.0, "loss": "jsd"}.items():
    TABLE[f"sft.distill.{key}"] = (TAUGHT | {f"sft.run.distill.{key}": value}, TEACHER)
    counted = {"sft", "teacher"} if key == "temperature" else {"sft"}
    SINGLE[f"sft.distill.{key}"] = (TAUGHT, {f"sft.run.distill.{key}": value}, counted)
TABLE["eval.teacher_of"] = (TAUGHT | {"eval.both.teacher_of": "run"}, TEACHER)
SINGLE["eval.teacher_of"] = (TAUGHT, {"eval.both.teacher_of": "run"}, {"eval"})
MODEL = {
    "path": {"path": "other/model"}, "revision": {"revision": "f00"}, "trust_remote_code": {"trust_remote_code": True},
    "rope.type": {"rope": {**ROPE, "type": "linear"}}, "rope.factor": {"rope": {**ROPE, "factor": 2.0}},
    "rope.original_max_position_embeddings": {"rope": {**ROPE, "original_max_position_embeddings": 512}},
}  # fmt: skip
for key, value in MODEL.items():
    TABLE[f"teacher.model.{key}"] = (TAUGHT | {"teacher.big.model": PRETRAINED | value}, TEACHER)
