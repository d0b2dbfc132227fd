package cni

import "github.com/containernetworking/cni/libcni"

// directories are the directories of configurations and plugins, which can change while the
// network is open.
type directories struct {
	conf string
	bin  []string
	lib  *libcni.CNIConfig // runs plugins of bin
}

func (n *Network) setDirectories(conf string, bin []string) {
	n.dirs.Store(&directories{conf, bin, libcni.NewCNIConfigWithCacheDir(bin, n.cfg.CacheDir, n.plugins)})
}

// Prepare checks new directories of configurations and plugins, and returns the function that
// applies them. Running plugins are not affected. The error is InvalidArgument.
func (n *Network) Prepare(confDir string, binDirs []string) (apply func(), err error) {
	next := n.cfg
	next.ConfDir, next.BinDirs = confDir, binDirs
	if err := next.validate(); err != nil {
		return nil, err
	}
	return func() {
		n.setDirectories(confDir, binDirs)
		select {
		case n.moved <- struct{}{}:
		default: // the owner has not taken the last change yet
		}
	}, nil
}
