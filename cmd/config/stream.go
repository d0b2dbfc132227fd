package config

import (
	"errors"
	"fmt"
	"net/netip"
)

// checkStream validates the options of streaming sessions together.
func (c *Config) checkStream() error {
	address, err := netip.ParseAddrPort(c.StreamAddress)
	switch {
	case err != nil:
		return fmt.Errorf("stream.address: %q is not an IP address and a port, like 127.0.0.1:0", c.StreamAddress)
	case (c.StreamTLSCert == "") != (c.StreamTLSKey == ""):
		return errors.New("stream.tls_cert and stream.tls_key: one needs the other")
	case c.StreamClientCA != "" && c.StreamTLSCert == "":
		return errors.New("stream.client_ca: clients can show certificates only with stream.tls_cert")
	case !address.Addr().Unmap().IsLoopback() && c.StreamTLSCert == "":
		return fmt.Errorf("stream.address: %s is not a loopback address, which needs stream.tls_cert", address.Addr())
	}
	return nil
}
