package config

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
)

// minBandwidth is the least limit of all uploads together, in bytes a second. With less, every
// transfer would be slower than peers accept.
const minBandwidth = 1 << 20

// checkPeers checks the options of table peers together.
func (c *Config) checkPeers() error {
	if c.PeersListen == "" {
		return nil
	}
	if _, err := netip.ParseAddrPort(c.PeersListen); err != nil {
		return fmt.Errorf("peers.listen: %q is not an IP address and a port, like 0.0.0.0:4789", c.PeersListen)
	}
	advertised, err := netip.ParseAddrPort(c.PeersAdvertise)
	if err != nil || advertised.Addr().IsUnspecified() || advertised.Port() == 0 {
		return fmt.Errorf("peers.advertise: %q is not an IP address and a port of this node, like 10.0.0.5:4789", c.PeersAdvertise)
	}
	if c.PeersCert == "" || c.PeersKey == "" || c.PeersCA == "" {
		return errors.New("peers.listen needs peers.cert, peers.key and peers.ca")
	}
	if b := c.PeersBandwidth; b != 0 && b < minBandwidth {
		return fmt.Errorf("peers.upload_bandwidth: %d is less than %d", b, minBandwidth)
	}
	for _, seed := range c.PeersSeeds {
		host, port, err := net.SplitHostPort(seed)
		if _, notPort := strconv.ParseUint(port, 10, 16); err != nil || host == "" || notPort != nil {
			return fmt.Errorf("peers.seeds: %q is not HOST:PORT, like nodes.example:4789", seed)
		}
	}
	return nil
}
