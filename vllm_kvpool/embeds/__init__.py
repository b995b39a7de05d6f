"""The connector that transfers embeddings of media from encoders to engines."""
