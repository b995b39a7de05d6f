"""The router for engines that compute prompts apart from decoding."""
