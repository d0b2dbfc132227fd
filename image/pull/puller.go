package pull

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"berth/image"
	"berth/image/governor"
	"berth/image/layer"
	"berth/image/lazy"
	"berth/image/peers"
	"berth/image/profile"
	"berth/image/registry"
	"berth/image/unpack"
	"berth/image/unpack/budget"
	"berth/internal/cleanup"
	"berth/internal/fair"
	"berth/internal/task"
)

// Config configures a Puller and the store that it pulls into.
type Config struct {
	Root string // directory of the store, on the filesystem of the containers' writable layers
	image.Settings
	Unpack               layer.Unpacker     // unpacks blobs into files
	Limits               unpack.Limits      // of one layer; a zero field has its value in unpack.DefaultLimits
	Reserve              layer.Reserve      // disk space that layers leave free; zero: none
	Profile              ProfileChecker     // checks security profiles; nil: they cannot be pulled
	Pack                 layer.Packer       // packs blobs into EROFS layers
	Probe                func(string) error // reports whether EROFS layers in a directory can be mounted; nil: erofs.Probe
	MergeMemory          int64              // bytes for merging EROFS layers, of all images together; 0: erofs.MaxMemory
	WorkMemory           int64              // bytes that all unpack processes together may keep of their layers (unpack.Limits.Memory and Window); 0: only Limits count
	Driver               string             // form of new layers: a rootfs.Kind, or "auto" for EROFS where the kernel mounts it; empty: directory
	MaxParallelDownloads int                // concurrent layer downloads of one pull; 0: DefaultParallelDownloads
	MaxUnpacking         int                // concurrent unpack processes of all pulls; 0: budget.DefaultSlots
	MaxRangeRequests     int                // concurrent range requests for parts of large layers, see registry.Config.Spare; 0: none
	StallTimeout         time.Duration      // longest wait for a byte of a transfer; 0: one minute
	Governor             governor.Config    // limits the rate of pulls; the Puller sets Changed
	PartialTTL           time.Duration      // how long layers and bytes of failed pulls are kept; 0: they are deleted
	IndexBytes           int64              // bytes of all indexes of blobs, see package blobindex; 0: none are made
	Lazy                 lazy.Config        // layers that are used before they are complete
	Platform             ocispec.Platform   // zero: this machine's
	Waits                *task.Waits        // records waits for verbose Status; nil: no recording
	Observer             Observer           // nil: none
}

// DefaultParallelDownloads is the default of Config.MaxParallelDownloads.
const DefaultParallelDownloads = 8

// Puller adds images to the node's store: from registries, peers and archives. Its methods may be
// called concurrently.
type Puller struct {
	cfg    Config
	log    *slog.Logger
	store  *image.Store
	lazy   *lazy.Layers
	client *registry.Client

	profiles *profile.Store
	flights  *flights
	budget   *budget.Budget
	governor *governor.Governor
	peers    atomic.Pointer[peers.Peers] // nil: none, see UsePeers
	pulls    pulls
	accesses accesses

	ctx       context.Context // of pulls and downloads; canceled by shutdown
	shutdown  context.CancelFunc
	closeOnce func() error
}

// Open opens the store below cfg.Root, creates the directory if needed, and returns a Puller into
// it. The caller closes the Puller.
func Open(ctx context.Context, cfg Config, log *slog.Logger) (_ *Puller, err error) {
	cfg = cfg.withDefaults()
	client, err := registry.NewClient(registry.Config{
		Sources: cfg.Registries, StallTimeout: cfg.StallTimeout, Log: log,
		Spare: fair.NewSlots(cfg.MaxRangeRequests).TryAcquire,
	})
	if err != nil {
		return nil, err
	}
	undo := cleanup.New()
	defer undo.Run(&err)
	running, cancel := context.WithCancel(context.Background())
	undo.Add("end pulls", func() error { cancel(); return nil })
	p := &Puller{cfg: cfg, log: log, client: client, flights: newFlights(running, log),
		governor: newGovernor(cfg.Governor, log), ctx: running, shutdown: cancel}
	p.budget = budget.New(budget.Config{Limits: cfg.Limits, Memory: cfg.WorkMemory, Merging: cfg.MergeMemory,
		Slots: cfg.MaxUnpacking, Waits: cfg.Waits})
	p.lazy = lazy.New(cfg.Lazy, lazy.Parts{Root: cfg.Root, Client: client, Budget: p.budget,
		MergeMemory: cfg.MergeMemory, IndexBytes: cfg.IndexBytes, Observer: cfg.Observer, Waits: cfg.Waits,
		Begin: p.governor.Begin, Slow: p.slow}, log)
	p.lazy.OnComplete(p.announce)
	p.store, err = image.Open(ctx, image.Config{Root: cfg.Root, Settings: cfg.Settings, Client: client, Lazy: p.lazy,
		Unpack: cfg.Unpack, Pack: cfg.Pack, Reserve: cfg.Reserve, Probe: cfg.Probe, MergeMemory: cfg.MergeMemory,
		Driver: cfg.Driver, PartialTTL: cfg.PartialTTL, Waits: cfg.Waits}, log)
	if err != nil {
		return nil, err
	}
	undo.Add("close images", p.store.Close)
	if p.profiles, err = openProfiles(cfg.Root, log); err != nil {
		return nil, err
	}
	p.closeOnce = sync.OnceValue(p.close)
	undo.Release()
	return p, nil
}

func (cfg Config) withDefaults() Config {
	if cfg.MaxParallelDownloads <= 0 {
		cfg.MaxParallelDownloads = DefaultParallelDownloads
	}
	if cfg.Platform.OS == "" {
		cfg.Platform = registry.DefaultPlatform()
	}
	if cfg.Observer == nil {
		cfg.Observer = noObserver{}
	}
	cfg.Limits = cfg.Limits.WithDefaults()
	return cfg
}

// newGovernor returns a governor that logs when pods begin to slow pulls down, and when that ends.
// Changes of the limit in between, up to one a second, are debug messages.
func newGovernor(cfg governor.Config, log *slog.Logger) *governor.Governor {
	var slowed atomic.Bool
	cfg.Changed = func(limit int64) {
		slow := limit > 0 && (cfg.Bandwidth == 0 || limit < cfg.Bandwidth)
		level := slog.LevelInfo
		if was := slowed.Swap(slow); was == slow {
			level = slog.LevelDebug
		}
		if !slow {
			log.Log(context.Background(), level, "pulls are no longer slowed down")
			return
		}
		log.Log(context.Background(), level, "pulls are slowed down because pods wait", "bytes_per_second", limit)
	}
	return governor.New(cfg)
}

// Store returns the store that the Puller adds images to. Close closes it.
func (p *Puller) Store() *image.Store { return p.store }

// Budget returns the capacity for unpacking.
func (p *Puller) Budget() *budget.Budget { return p.budget }

// Progress returns the pulls under way, oldest first.
func (p *Puller) Progress() []Progress { return p.pulls.snapshot() }

// Close cancels pulls, waits for them, and closes the store. Later pulls fail. Only methods that
// read may run during or after Close. A second call does nothing.
func (p *Puller) Close() error { return p.closeOnce() }

func (p *Puller) close() error {
	p.shutdown()
	p.pulls.close()
	p.flights.wait()
	return p.store.Close()
}

// slow counts n received bytes, and waits until the pulls may receive more.
func (p *Puller) slow(ctx context.Context, n int) error {
	waited, err := p.governor.Wait(ctx, n)
	if waited > 0 {
		p.cfg.Observer.Slowed(waited)
	}
	return err
}
