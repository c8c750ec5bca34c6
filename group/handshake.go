package group

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"time"
)

// Every connection begins with a handshake before gRPC sees it, so that nobody who does not know the token can talk to the service:
//
//	client  "symmem", version, mode
//	service "symmem", version, mode   and hangs up if they differ, or if its process may open no further file
//	with a token: TLS 1.3, then
//	client  HMAC(token, "client" + exported key)
//	service 1, HMAC(token, "service" + exported key); or 0, and hangs up
//
// The proofs hold for this one TLS connection only: someone in the middle has two connections with different keys. The client proves itself first, so
// that somebody who merely connects learns nothing. Somebody who answers in place of the service gets a proof that is good for nothing but testing
// guessed tokens, so tokens that can be guessed are for loopback addresses only.

const (
	protocolMagic   = "symmem"
	protocolVersion = 3
	modePlain       = 'P'
	modeTLS         = 'T'
	modeFull        = 'F' // the service's process may open no further file; the limit follows, in 8 bytes

	exporterLabel  = "EXPORTER-symmem"
	clientRole     = "symmem client"
	serviceRole    = "symmem service"
	proofAccepted  = 1
	proofRefused   = 0
	prologueLength = len(protocolMagic) + 2
)

func prologue(mode byte) []byte { return append([]byte(protocolMagic), protocolVersion, mode) }

func modeOf(token string) byte {
	if token == "" {
		return modePlain
	}
	return modeTLS
}

// proof returns the bytes that prove knowledge of the token to a peer that has the same exported key.
func proof(token, role string, key []byte) []byte {
	mac := hmac.New(sha256.New, []byte(token))
	mac.Write([]byte(role)) //nolint:errcheck // a hash never fails to write
	mac.Write(key)          //nolint:errcheck
	return mac.Sum(nil)
}

// handshakeClient authenticates both sides of conn to each other. ctx bounds it; conn is unusable after an error.
func handshakeClient(ctx context.Context, conn net.Conn, o *Options) (net.Conn, error) {
	stop := interruptible(ctx, conn)
	defer stop()
	secure, err := clientSide(ctx, conn, o)
	if err != nil {
		return nil, err
	}
	if !stop() {
		return nil, ctx.Err()
	}
	return secure, conn.SetDeadline(time.Time{})
}

func clientSide(ctx context.Context, conn net.Conn, o *Options) (net.Conn, error) {
	mode := modeOf(o.Token)
	if _, err := conn.Write(prologue(mode)); err != nil {
		return nil, fmt.Errorf("greeting the service: %w", err)
	}
	answer := make([]byte, prologueLength)
	if n, err := io.ReadFull(conn, answer); err != nil {
		if n > 0 && string(answer[:min(n, len(protocolMagic))]) != protocolMagic[:min(n, len(protocolMagic))] {
			return nil, refused(RefusedNotService, "it answers %q, as no rendezvous service does", answer[:n])
		}
		return nil, fmt.Errorf("waiting for the service's greeting: %w", err)
	}
	version, theirs := answer[len(answer)-2], answer[len(answer)-1]
	switch {
	case string(answer[:len(protocolMagic)]) != protocolMagic:
		return nil, refused(RefusedNotService, "it answers %q, as no rendezvous service does", answer)
	case version != protocolVersion:
		return nil, refused(RefusedVersion, "the service speaks protocol version %d, this rank %d; use one release of symmem on all ranks",
			version, protocolVersion)
	case theirs == modeFull: // it may have room later
		limit := make([]byte, 8)
		if _, err := io.ReadFull(conn, limit); err != nil {
			return nil, fmt.Errorf("waiting for the service's greeting: %w", err)
		}
		return nil, &FileLimitError{Limit: binary.BigEndian.Uint64(limit), Owner: o.server()}
	case theirs != mode && mode == modePlain:
		return nil, refused(RefusedToken, "the service asks for a token and this rank has none; set SYMMEM_TOKEN to that of the job")
	case theirs != mode:
		return nil, refused(RefusedToken, "this rank has a token and the service has none; set SYMMEM_TOKEN on every rank or on none")
	case mode == modePlain:
		return conn, nil
	}
	secure := batchedClient(conn, clientTLS(o))
	if err := secure.HandshakeContext(ctx); err != nil {
		return nil, refusedTLS(err)
	}
	state := secure.ConnectionState()
	key, err := state.ExportKeyingMaterial(exporterLabel, nil, sha256.Size)
	if err != nil {
		return nil, fmt.Errorf("exporting the connection's key: %w", err)
	}
	if _, err := secure.Write(proof(o.Token, clientRole, key)); err != nil {
		return nil, refusedTLS(err)
	}
	verdict := make([]byte, 1+sha256.Size)
	if _, err := io.ReadFull(secure, verdict[:1]); err != nil {
		return nil, refusedTLS(err)
	}
	if verdict[0] != proofAccepted {
		return nil, refused(RefusedToken, "the token of this rank is not the token of the job; set SYMMEM_TOKEN alike on every rank")
	}
	if _, err := io.ReadFull(secure, verdict[1:]); err != nil {
		return nil, fmt.Errorf("waiting for the service's proof: %w", err)
	}
	if !hmac.Equal(verdict[1:], proof(o.Token, serviceRole, key)) {
		return nil, refused(RefusedToken, "the service could not prove that it knows the token: it is not this job's")
	}
	return secure, nil
}

// refusedTLS reports whether the peer refused us, rather than the connection having broken.
func refusedTLS(err error) error {
	var alert tls.AlertError
	var unverified *tls.CertificateVerificationError
	var record tls.RecordHeaderError
	var remote *net.OpError
	switch {
	case errors.As(err, &unverified), errors.As(err, &alert), errors.As(err, &record):
		return refused(RefusedTLS, "%v", err)
	case errors.As(err, &remote) && remote.Op == "remote error":
		return refused(RefusedTLS, "%v", err)
	}
	return fmt.Errorf("securing the connection: %w", err)
}

// handshakeService is the other side of handshakeClient. The caller has set conn's deadline.
func handshakeService(conn net.Conn, o *Options, certificates *tls.Config) (net.Conn, error) {
	greeting := make([]byte, prologueLength)
	if _, err := io.ReadFull(conn, greeting); err != nil {
		return nil, fmt.Errorf("waiting for a greeting: %w", err)
	}
	if string(greeting[:len(protocolMagic)]) != protocolMagic {
		return nil, fmt.Errorf("%q is no greeting of a rank", greeting)
	}
	mode := modeOf(o.Token)
	if _, err := conn.Write(prologue(mode)); err != nil {
		return nil, fmt.Errorf("greeting a rank: %w", err)
	}
	version, theirs := greeting[len(greeting)-2], greeting[len(greeting)-1]
	switch {
	case version != protocolVersion:
		return nil, fmt.Errorf("the rank speaks protocol version %d, not %d", version, protocolVersion)
	case theirs != mode:
		return nil, errors.New("one side has a token and the other has none")
	case mode == modePlain:
		return conn, nil
	}
	secure := batchedServer(conn, certificates)
	if err := secure.Handshake(); err != nil {
		return nil, fmt.Errorf("securing the connection: %w", err)
	}
	state := secure.ConnectionState()
	key, err := state.ExportKeyingMaterial(exporterLabel, nil, sha256.Size)
	if err != nil {
		return nil, fmt.Errorf("exporting the connection's key: %w", err)
	}
	claim := make([]byte, sha256.Size)
	if _, err := io.ReadFull(secure, claim); err != nil {
		return nil, fmt.Errorf("waiting for the rank's proof: %w", err)
	}
	if !hmac.Equal(claim, proof(o.Token, clientRole, key)) {
		err := errors.New("the rank has a wrong token")
		if _, writeErr := secure.Write([]byte{proofRefused}); writeErr != nil {
			err = errors.Join(err, writeErr)
		}
		return nil, errors.Join(err, secure.CloseWrite())
	}
	if _, err := secure.Write(append([]byte{proofAccepted}, proof(o.Token, serviceRole, key)...)); err != nil {
		return nil, fmt.Errorf("sending the service's proof: %w", err)
	}
	return secure, nil
}

// interruptible ends conn's reads and writes when the context does, until stop is called. stop reports whether it came first.
func interruptible(ctx context.Context, conn net.Conn) (stop func() bool) {
	return context.AfterFunc(ctx, func() {
		// The deadline is in the past. An error means that the connection is closed, and then nothing blocks either.
		_ = conn.SetDeadline(time.Unix(1, 0))
	})
}

// clientTLS accepts any certificate unless the caller gave its own configuration: the proofs say who the other side is.
func clientTLS(o *Options) *tls.Config {
	if o.TLS == nil {
		return &tls.Config{MinVersion: tls.VersionTLS13, InsecureSkipVerify: true} //nolint:gosec // see above
	}
	c := o.TLS.Clone()
	c.MinVersion = max(c.MinVersion, tls.VersionTLS13)
	if host, _, err := net.SplitHostPort(o.Addr); err == nil && c.ServerName == "" {
		c.ServerName = host
	}
	return c
}

// serviceTLS makes a certificate for the life of the service unless the caller gave its own.
func serviceTLS(o *Options) (*tls.Config, error) {
	if o.TLS != nil {
		c := o.TLS.Clone()
		c.MinVersion = max(c.MinVersion, tls.VersionTLS13)
		return c, nil
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("making a key for the rendezvous service: %w", err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1),
		Subject:      pkix.Name{CommonName: "symmem rendezvous"},
		NotBefore:    time.Now().Add(-24 * time.Hour), // clocks of hosts differ, and nobody checks it
		NotAfter:     time.Now().Add(10 * 365 * 24 * time.Hour),
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("making a certificate for the rendezvous service: %w", err)
	}
	return &tls.Config{
		MinVersion:   tls.VersionTLS13,
		Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}},
	}, nil
}
