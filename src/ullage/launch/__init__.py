"""How a server is started: command lines and manifests → `Launch`, and from it a `Deployment`.

Reads shell text, Dockerfiles, compose files, Kubernetes manifests and Helm values
(`documents.read_launches`). Nothing is run or expanded: what a variable hides stays unknown, by
name. Judges nothing.
"""
