package daemon

import (
	"fmt"
	"os"

	"berth/cmd/berthd/memory"
	"berth/cmd/config"
	"berth/image/blobindex"
	"berth/image/lazy"
	"berth/image/lazy/fill"
	"berth/sandbox/state"
	"berth/shim"
)

// lazyConfig returns the options of layers that are used before they are complete. It takes the
// events of these layers from the monitors, which have kept them for this daemon.
func (a *assembly) lazyConfig(budget memory.Budget) (lazy.Config, error) {
	dirs := state.Dirs{Root: a.cfg.Root, State: a.cfg.State}
	kept, err := shim.KeptFiles(dirs.Shim(""), isFanotify)
	if err != nil { // if there are no files, the layers are treated as if the monitors had died
		a.log.Warn("ask monitors for the events of incomplete layers", "found", kept != nil, "error", err)
	}
	// The directory is empty. It exists before the first layer, see state.Dirs.Prepare.
	root := dirs.EmptyLayer()
	return lazy.Config{
		Policy:   a.cfg.LazyPolicy,
		MinBytes: int64(a.cfg.LazyMinBytes),
		MinTime:  a.cfg.LazyMinTime.Duration,
		Stall:    a.cfg.LazyStall.Duration,
		Memory:   budget.LazyMemory(int64(a.cfg.LazyMemory)),
		Kept:     kept,
		Inflate: func(kind blobindex.Compression, tarSize int64) (fill.Inflater, error) {
			return a.unpacker.Inflate(root, kind, tarSize)
		},
	}, nil
}

// isFanotify reports whether a file is a fanotify group.
func isFanotify(f *os.File) bool {
	name, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", f.Fd()))
	return err == nil && name == "anon_inode:[fanotify]"
}

// indexBytes returns the limit of all indexes of blobs.
func indexBytes(cfg *config.Config) int64 {
	if cfg.IndexBytes == 0 && cfg.LazyPolicy != lazy.Off {
		return blobindex.DefaultMaxBytes
	}
	return int64(cfg.IndexBytes)
}
