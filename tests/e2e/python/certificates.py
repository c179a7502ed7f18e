"""Certificates for tests, made on the spot."""

import datetime
import ipaddress
import os

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def _name(common_name):
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _pem_of(key):
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption())


class Pair:
    """A certificate and its key, in PEM."""

    def __init__(self, certificate, key):
        self.certificate = certificate.public_bytes(
            serialization.Encoding.PEM)
        self.key = _pem_of(key)
        self.serial = certificate.serial_number
        # In UTC, and to the second.
        self.not_valid_after = certificate.not_valid_after

    def write(self, folder, name):
        """The paths of the certificate and of the key."""
        paths = []
        for suffix, text in ((".crt", self.certificate), (".key", self.key)):
            paths.append(replace(os.path.join(folder, name + suffix), text))
        return paths


class Authority:
    """Signs certificates, and takes them back."""

    def __init__(self, name, parent=None):
        """Its own authority, or one whose certificate the parent signs."""
        self._name = _name(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        issuer = parent or self
        now = datetime.datetime.utcnow()
        self._certificate = (
            x509.CertificateBuilder().subject_name(self._name)
            .issuer_name(issuer._name).public_key(self._key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=2))
            .not_valid_after(now + datetime.timedelta(days=365))
            .add_extension(x509.BasicConstraints(True, None), critical=True)
            .sign(issuer._key, hashes.SHA256()))
        self.serial = self._certificate.serial_number
        self.certificate = self._certificate.public_bytes(
            serialization.Encoding.PEM)

    def issue(self, common_name, days=90, names=()):
        """A certificate that ends in so many days, since yesterday or before.

        names: subject alternative names; an address or a name of DNS each.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.datetime.utcnow()
        builder = (
            x509.CertificateBuilder().subject_name(_name(common_name))
            .issuer_name(self._name).public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1 + max(0, -days)))
            .not_valid_after(now + datetime.timedelta(days=days)))
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName([
                x509.IPAddress(ipaddress.ip_address(name))
                if name[0].isdigit() else x509.DNSName(name)
                for name in names]), critical=False)
        return Pair(builder.sign(self._key, hashes.SHA256()), key)

    def revoke(self, pairs):
        """The list of what is revoked, in PEM."""
        now = datetime.datetime.utcnow()
        builder = (x509.CertificateRevocationListBuilder()
                   .issuer_name(self._name).last_update(now)
                   .next_update(now + datetime.timedelta(days=1)))
        for pair in pairs:
            builder = builder.add_revoked_certificate(
                x509.RevokedCertificateBuilder().serial_number(pair.serial)
                .revocation_date(now).build())
        return builder.sign(self._key, hashes.SHA256()).public_bytes(
            serialization.Encoding.PEM)


def replace(path, text):
    """Writes a file so that readers see all of it or what was there before."""
    temporary = path + ".new"
    with open(temporary, "wb") as file:
        file.write(text)
    os.replace(temporary, path)
    return path
