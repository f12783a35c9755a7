"""Certificates: what is proven about a program before it runs. `docs/certificates.md` tells how."""
