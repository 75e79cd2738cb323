//! Certificates of a made-up cluster.

use std::sync::Arc;

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};

/// A cluster's authority.
pub(crate) struct Cluster {
    issuer: Issuer<'static, KeyPair>,
    roots: Arc<RootCertStore>,
}

/// A host of it.
pub(crate) struct Host {
    pub(crate) certificate: CertificateDer<'static>,
    pub(crate) server: Arc<ServerConfig>,
    pub(crate) client: Arc<ClientConfig>,
    /// A client that shows no certificate.
    pub(crate) nameless: Arc<ClientConfig>,
}

/// The name that the certificate of host `number` has.
pub(crate) fn name_of(number: u64) -> ServerName<'static> {
    ServerName::try_from(format!("{number:016x}.vmfork.internal")).expect("a name")
}

impl Cluster {
    pub(crate) fn new() -> Self {
        let key = KeyPair::generate().expect("a key");
        let mut params = CertificateParams::new(Vec::new()).expect("no names");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let mut roots = RootCertStore::empty();
        roots.add(params.self_signed(&key).expect("a key").der().clone()).expect("a root");
        Self { issuer: Issuer::new(params, key), roots: Arc::new(roots) }
    }

    pub(crate) fn host(&self, number: u64) -> Host {
        let key = KeyPair::generate().expect("a key");
        let names = vec![name_of(number).to_str().into_owned()];
        let params = CertificateParams::new(names).expect("a name");
        let certificate = params.signed_by(&key, &self.issuer).expect("a key").der().clone();
        let key = PrivateKeyDer::try_from(key.serialize_der()).expect("a key");
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let chain = vec![certificate.clone()];

        let roots = Arc::clone(&self.roots);
        let clients =
            WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone()).build();
        let server = ServerConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .expect("TLS 1.3")
            .with_client_cert_verifier(clients.expect("roots"))
            .with_single_cert(chain.clone(), key.clone_key())
            .expect("its own key");
        let client = || {
            ClientConfig::builder_with_provider(provider.clone())
                .with_protocol_versions(&[&rustls::version::TLS13])
                .expect("TLS 1.3")
                .with_root_certificates(roots.clone())
        };
        Host {
            certificate,
            server: Arc::new(server),
            nameless: Arc::new(client().with_no_client_auth()),
            client: Arc::new(client().with_client_auth_cert(chain, key).expect("its own key")),
        }
    }
}
