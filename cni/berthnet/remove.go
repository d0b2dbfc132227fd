package berthnet

import (
	"context"
	"errors"

	"berth/cni/berthnet/conf"
	"berth/cni/berthnet/links"
	"berth/cni/berthnet/rules"
	"berth/internal/lockfile"
)

// Installed names the devices and the nftables table that a network has on the node. The network is
// given by its key.
func Installed(key string) (names []string, err error) {
	bridges, err := links.BridgesOf(key)
	if err != nil {
		return nil, err
	}
	for _, b := range bridges {
		names = append(names, "bridge "+b)
	}
	ports, err := links.Ports(key)
	if err != nil {
		return nil, err
	}
	for _, p := range ports {
		names = append(names, "network device "+p.Name)
	}
	filter := &rules.Filter{}
	defer filter.Close()
	installed, err := filter.HasTable(key)
	if installed {
		names = append(names, "nftables table inet "+rules.TablePrefix+key)
	}
	return names, err
}

// Retire uninstalls a network that gets no more pods, once no attachment has a reservation. It
// returns what it has removed.
func Retire(ctx context.Context, n *conf.Net) (removed []string, err error) {
	installed, err := Installed(n.Key())
	if err != nil || len(installed) == 0 {
		return nil, err
	}
	reserved, err := Reservations(n)
	if err != nil || len(reserved) > 0 {
		return nil, err
	}
	return installed, Uninstall(ctx, n.Key())
}

// Uninstall deletes the devices and the nftables table of a network, which must have no pods. A
// bridge that the network did not make keeps existing. Uninstall may be repeated.
func Uninstall(ctx context.Context, key string) error {
	unlock, err := links.Lock(ctx, lockfile.Exclusive)
	if err != nil {
		return err
	}
	defer unlock()
	ports, err := links.Ports(key)
	for _, p := range ports {
		err = errors.Join(err, links.Cut(p.ContainerID, p.IfName, true))
	}
	filter := &rules.Filter{}
	defer filter.Close()
	return errors.Join(err, links.DeleteBridgesOf(key), filter.DeleteTable(key))
}
