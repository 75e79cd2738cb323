//! Keys and certificates: the cluster's own authority, each host's identity, and TLS with them.
//!
//! ```text
//!   Authority ── certify ──► certificate of HOSTID.vmfork.internal ──► Identity ──► Tls
//!       ▲                                                                            ▲
//!   every member has its key: any can admit              Roster: who is a member now ┘
//!
//!   Tls ──► ServerConfig, ClientConfig
//! ```
//!
//! A certificate of the authority is not enough: its fingerprint must be a member's, at the moment
//! of the handshake. So certificates need not expire and need no revocation lists; a host that left
//! has the authority's key, and gains nothing by it.
//!
//! Keys are ECDSA on P-256, from `aws-lc-rs`.

mod tls;
#[cfg(test)]
mod tls_tests;

use std::fmt;
use std::sync::Arc;

use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DistinguishedName,
    DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
};
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, CertificateSigningRequestDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;

use crate::id::{Fingerprint, HostId};

pub use tls::{JOIN_PROTOCOL, PeerError, Tls};
pub(crate) use tls::{check_certified, join_client};

/// Most bytes of a certificate or a signing request: ours have less than 1000.
pub(crate) const CERTIFICATE_BYTES_MAX: usize = 8192;

/// Keys or certificates that can't be made or used.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    #[error("make {what}")]
    Make {
        what: &'static str,
        #[source]
        source: rcgen::Error,
    },
    #[error("{what} is not what it should be")]
    Parse {
        what: &'static str,
        #[source]
        source: rcgen::Error,
    },
    #[error("{what} is no PEM: {why}")]
    Pem { what: &'static str, why: String },
    #[error("{what} has {bytes} bytes; it may have {CERTIFICATE_BYTES_MAX}")]
    TooLong { what: &'static str, bytes: usize },
    #[error("the certificate and the key of {whose} don't belong together")]
    Mismatch {
        whose: String,
        #[source]
        source: rustls::Error,
    },
    #[error("the certificate is not one of this cluster's for host {host}")]
    NotCertified {
        host: HostId,
        #[source]
        source: rustls::Error,
    },
    #[error("set TLS up")]
    Tls {
        #[source]
        source: rustls::Error,
    },
    #[error("set the checking of certificates up")]
    Verifier {
        #[source]
        source: rustls::server::VerifierBuilderError,
    },
}

pub(crate) fn provider() -> Arc<CryptoProvider> {
    Arc::new(aws_lc_rs::default_provider())
}

fn making(what: &'static str) -> impl FnOnce(rcgen::Error) -> KeyError {
    move |source| KeyError::Make { what, source }
}

fn parsing(what: &'static str) -> impl FnOnce(rcgen::Error) -> KeyError {
    move |source| KeyError::Parse { what, source }
}

fn certificate_of_pem(what: &'static str, pem: &str) -> Result<CertificateDer<'static>, KeyError> {
    if pem.len() > 2 * CERTIFICATE_BYTES_MAX {
        return Err(KeyError::TooLong { what, bytes: pem.len() });
    }
    CertificateDer::from_pem_slice(pem.as_bytes())
        .map_err(|e| KeyError::Pem { what, why: e.to_string() })
}

fn key_of_pem(what: &'static str, pem: &str) -> Result<PrivateKeyDer<'static>, KeyError> {
    PrivateKeyDer::from_pem_slice(pem.as_bytes())
        .map_err(|e| KeyError::Pem { what, why: e.to_string() })
}

/// A certificate as text, for files and messages.
pub(crate) fn certificate_pem(certificate: &CertificateDer<'_>) -> String {
    const LINE_CHARS: usize = 64;
    let base64 = base64::Engine::encode(&base64::engine::general_purpose::STANDARD, certificate);
    let mut pem = String::from("-----BEGIN CERTIFICATE-----\n");
    let mut rest = base64.as_str();
    while !rest.is_empty() {
        let (line, tail) = rest.split_at(rest.len().min(LINE_CHARS));
        pem.push_str(line);
        pem.push('\n');
        rest = tail;
    }
    pem.push_str("-----END CERTIFICATE-----\n");
    pem
}

/// Refuses a key that is not the certificate's.
fn check_pair(
    whose: impl FnOnce() -> String,
    certificate: &CertificateDer<'static>,
    key: PrivateKeyDer<'static>,
) -> Result<(), KeyError> {
    CertifiedKey::from_der(vec![certificate.clone()], key, &provider())
        .map(drop)
        .map_err(|source| KeyError::Mismatch { whose: whose(), source })
}

/// Who certifies the hosts of a cluster: any member, by the key that all of them have.
pub struct Authority {
    certificate: CertificateDer<'static>,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    /// A new one, for a new cluster.
    ///
    /// # Errors
    /// The keys can't be made.
    pub fn generate() -> Result<Self, KeyError> {
        const WHAT: &str = "the cluster's authority";
        let key = KeyPair::generate().map_err(making(WHAT))?;
        let mut params = CertificateParams::default();
        params.distinguished_name = common_name("vmfork cluster");
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let certificate = params.self_signed(&key).map_err(making(WHAT))?.der().clone();
        let issuer = Issuer::from_ca_cert_der(&certificate, key).map_err(making(WHAT))?;
        Ok(Self { certificate, issuer })
    }

    /// From what [`Authority::certificate_pem`] and [`Authority::key_pem`] gave.
    ///
    /// # Errors
    /// They are something else, or don't belong together.
    pub fn from_pem(certificate_pem: &str, key_pem: &str) -> Result<Self, KeyError> {
        const CERTIFICATE: &str = "the certificate of the cluster's authority";
        const KEY: &str = "the key of the cluster's authority";
        let certificate = certificate_of_pem(CERTIFICATE, certificate_pem)?;
        let der = key_of_pem(KEY, key_pem)?;
        check_pair(|| "the cluster's authority".to_owned(), &certificate, der)?;
        let key = KeyPair::from_pem(key_pem).map_err(parsing(KEY))?;
        let issuer = Issuer::from_ca_cert_der(&certificate, key).map_err(parsing(CERTIFICATE))?;
        Ok(Self { certificate, issuer })
    }

    pub fn certificate(&self) -> &CertificateDer<'static> {
        &self.certificate
    }

    pub fn certificate_pem(&self) -> String {
        certificate_pem(&self.certificate)
    }

    /// A secret: who has it can make certificates of the cluster, which members then still refuse.
    pub fn key_pem(&self) -> String {
        self.issuer.key().serialize_pem()
    }

    /// A certificate for `host` and the key that signed the request, whatever else that asks for.
    ///
    /// # Errors
    /// It is no signing request, or not signed by the key that it names.
    pub fn certify(
        &self,
        host: HostId,
        csr_der: &[u8],
    ) -> Result<CertificateDer<'static>, KeyError> {
        const WHAT: &str = "the signing request";
        if csr_der.len() > CERTIFICATE_BYTES_MAX {
            return Err(KeyError::TooLong { what: WHAT, bytes: csr_der.len() });
        }
        let csr = CertificateSigningRequestDer::from(csr_der);
        let csr = CertificateSigningRequestParams::from_der(&csr).map_err(parsing(WHAT))?;
        let certificate = host_params(host)
            .and_then(|params| params.signed_by(&csr.public_key, &self.issuer))
            .map_err(making("the host's certificate"))?;
        Ok(certificate.der().clone())
    }
}

impl fmt::Debug for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Authority({})", Fingerprint::of(&self.certificate))
    }
}

fn common_name(name: &str) -> DistinguishedName {
    let mut it = DistinguishedName::new();
    it.push(DnType::CommonName, name);
    it
}

/// Of every host's certificate. Valid from 1975 to 4096, which are rcgen's: see the module's text.
fn host_params(host: HostId) -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::new(vec![host.domain_name()])?;
    params.distinguished_name = common_name(&host.to_string());
    params.is_ca = IsCa::ExplicitNoCa;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    // Each is server to some and client to others.
    params.extended_key_usages =
        vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    params.use_authority_key_identifier_extension = true;
    Ok(params)
}

/// A host's key, not yet certified.
pub struct HostKey {
    host: HostId,
    key: KeyPair,
}

impl HostKey {
    /// # Errors
    /// It can't be made.
    pub fn generate(host: HostId) -> Result<Self, KeyError> {
        let key = KeyPair::generate().map_err(making("the host's key"))?;
        Ok(Self { host, key })
    }

    /// Whose it is.
    pub fn host(&self) -> HostId {
        self.host
    }

    /// The signing request for [`Authority::certify`], as DER.
    ///
    /// # Errors
    /// It can't be made.
    pub fn signing_request(&self) -> Result<Vec<u8>, KeyError> {
        let request = host_params(self.host)
            .and_then(|mut params| {
                // rcgen reads no request that asks for more than names, and the authority decides
                // the rest anyhow.
                params.key_usages.clear();
                params.extended_key_usages.clear();
                params.is_ca = IsCa::NoCa;
                params.use_authority_key_identifier_extension = false;
                params.serialize_request(&self.key)
            })
            .map_err(making("the signing request"))?;
        Ok(request.der().to_vec())
    }

    /// A secret.
    pub fn key_pem(&self) -> String {
        self.key.serialize_pem()
    }
}

impl fmt::Debug for HostKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostKey({})", self.host)
    }
}

/// A host with its certificate and key.
#[derive(Clone)]
pub struct Identity {
    host: HostId,
    certificate: CertificateDer<'static>,
    key_pem: String,
}

impl Identity {
    /// A new one, of this authority.
    ///
    /// # Errors
    /// It can't be made.
    pub fn generate(host: HostId, authority: &Authority) -> Result<Self, KeyError> {
        let key = HostKey::generate(host)?;
        let certificate = authority.certify(host, &key.signing_request()?)?;
        Self::new(host, certificate, key.key_pem())
    }

    /// From what [`Identity::certificate_pem`] and [`Identity::key_pem`] gave.
    ///
    /// # Errors
    /// They are something else, or don't belong together.
    pub fn from_pem(
        host: HostId,
        certificate_pem: &str,
        key_pem: String,
    ) -> Result<Self, KeyError> {
        Self::new(host, certificate_of_pem("the host's certificate", certificate_pem)?, key_pem)
    }

    fn new(
        host: HostId,
        certificate: CertificateDer<'static>,
        key_pem: String,
    ) -> Result<Self, KeyError> {
        let it = Self { host, certificate, key_pem };
        check_pair(|| format!("host {host}"), &it.certificate, it.key()?)?;
        Ok(it)
    }

    pub fn host(&self) -> HostId {
        self.host
    }

    pub fn certificate(&self) -> &CertificateDer<'static> {
        &self.certificate
    }

    pub fn fingerprint(&self) -> Fingerprint {
        Fingerprint::of(&self.certificate)
    }

    pub fn certificate_pem(&self) -> String {
        certificate_pem(&self.certificate)
    }

    /// A secret.
    pub fn key_pem(&self) -> &str {
        &self.key_pem
    }

    fn key(&self) -> Result<PrivateKeyDer<'static>, KeyError> {
        key_of_pem("the host's key", &self.key_pem)
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Identity({}, {})", self.host, self.fingerprint())
    }
}
