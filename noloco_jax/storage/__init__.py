"""Files at addresses of object stores and web servers, beside local ones: reading, writing, retries."""
