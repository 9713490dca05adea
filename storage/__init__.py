"""What a run leaves behind and how it is read: prompts in, dump out. Needs neither Ray nor SGLang."""
