package registry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"berth/internal/errdefs"
)

// Config configures a [Client].
type Config struct {
	Sources
	StallTimeout time.Duration // longest wait for a byte; 0: one minute
	UserAgent    string        // empty: "berth"
	Log          *slog.Logger  // for warnings about configuration; nil: none

	// Spare, if not nil, grants one more range request to a registry, for a part of a large, slow
	// blob. Spare does not wait. A part takes PartSize bytes of memory until giveBack is called.
	Spare func(registry string) (giveBack func(), ok bool)
}

// Sources are where a [Client] finds hosts and credentials.
type Sources struct {
	Dirs           []string // roots of containerd's certs.d layout; the first with a directory for the host wins
	AuthFiles      []string // credentials: files as in containers-auth.json(5), searched in this order, or StandardAuthFiles
	DockerConfig   string   // docker's config.json, searched after AuthFiles; empty: none
	RegistriesConf string   // containers-registries.conf(5); empty: none
}

// DefaultStallTimeout is the default of StallTimeout in [Config].
const DefaultStallTimeout = time.Minute

// Client opens repositories, see [Client.Open]. It has no connections, and its only state is its
// sources. Its methods may be called concurrently.
type Client struct {
	sources  atomic.Pointer[loaded]
	log      *slog.Logger
	warned   sync.Map // messages that were logged
	stall    time.Duration
	pause    time.Duration // firstDelay, shorter in tests
	document time.Duration // documentTimeout, shorter in tests
	agent    string
	parts    partsConfig
}

// partsConfig configures the range requests for large blobs.
type partsConfig struct {
	spare  func(registry string) (giveBack func(), ok bool)
	size   int64         // PartSize, smaller in tests
	watch  time.Duration // watchTime, shorter in tests
	trial  time.Duration // trialTime, longer in tests
	enough float64       // fastEnough, other values in tests
}

// Prepare reads the registries.conf of new sources and returns a function. The function replaces
// the present sources for repositories that are opened later. The error is FailedPrecondition.
func (c *Client) Prepare(s Sources) (apply func(), err error) {
	next, err := s.load()
	if err != nil {
		return nil, err
	}
	return func() { c.sources.Store(next) }, nil
}

// NewClient returns a client. It reads host directories and credentials each time a repository is
// opened, so changes need no restart. It reads registries.conf now and in [Client.Prepare]. The
// error is FailedPrecondition.
func NewClient(cfg Config) (*Client, error) {
	c := &Client{log: cfg.Log, stall: cfg.StallTimeout, pause: firstDelay, document: documentTimeout, agent: cfg.UserAgent,
		parts: partsConfig{cfg.Spare, PartSize, watchTime, trialTime, fastEnough}}
	var err error
	set, err := c.Prepare(cfg.Sources)
	if err != nil {
		return nil, err
	}
	set()
	if c.log == nil {
		c.log = slog.New(slog.DiscardHandler)
	}
	if c.stall <= 0 {
		c.stall = DefaultStallTimeout
	}
	if c.agent == "" {
		c.agent = "berth"
	}
	return c, nil
}

// Repository is the source of one image: the hosts that may serve it, and the authentication state
// of each. Its methods may be called concurrently.
type Repository struct {
	client    *Client
	ref       Reference
	given     Credentials
	endpoints []*endpoint
	pause     time.Duration
	parts     partsConfig

	mu sync.Mutex
	// +checklocks:mu
	served []string
	// +checklocks:mu
	wrong map[wrongBlob]bool // see noteWrong
}

// Open prepares to fetch the image that ref names with the given credentials (zero: none). It sends
// nothing. The caller closes the repository.
func (c *Client) Open(ref Reference, given Credentials) (*Repository, error) {
	return c.OpenWithin(ref, given, c.stall)
}

// OpenWithin is [Client.Open] with a shorter limit for the wait for a byte.
func (c *Client) OpenWithin(ref Reference, given Credentials, stall time.Duration) (*Repository, error) {
	stall = min(stall, c.stall)
	from := c.sources.Load()
	sources, err := from.names.sources(ref)
	if err != nil {
		return nil, err
	}
	r := &Repository{client: c, ref: ref, given: given, pause: c.pause, parts: c.parts}
	for _, s := range sources {
		places, err := s.places(from.Dirs)
		if err != nil {
			return nil, err
		}
		for _, h := range places {
			c.warnUnknown(s.Domain, h.unknown)
			e, err := newEndpoint(h, s, c, given, ref.Domain, from.Dirs, stall)
			if err != nil {
				return nil, errdefs.FailedPrecondition("configuration of registry host %s: %s: %w", s.Domain, h.Host, err)
			}
			r.endpoints = append(r.endpoints, e)
		}
	}
	return r, nil
}

// Again opens the repository again, with the credentials that Open got. It reads hosts and other
// credentials again. See [Client.OpenWithin] for stall.
func (r *Repository) Again(stall time.Duration) (*Repository, error) {
	return r.client.OpenWithin(r.ref, r.given, stall)
}

// warnUnknown logs each message about the hosts.toml of a registry once.
func (c *Client) warnUnknown(domain string, messages []string) {
	for _, m := range messages {
		if _, again := c.warned.LoadOrStore(domain+" "+m, true); !again {
			c.log.Warn("hosts.toml of a registry has an unknown key, which has no effect", "registry", domain, "key", m)
		}
	}
}

// Close closes idle connections. Current transfers continue.
func (r *Repository) Close() {
	for _, e := range r.endpoints {
		e.wires.closeIdle()
	}
}

// Served returns the hosts that have answered, with their ports, in the order of their first
// answers.
func (r *Repository) Served() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.served)
}

func (r *Repository) noteServed(e *endpoint) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !slices.Contains(r.served, e.base.Host) {
		r.served = append(r.served, e.base.Host)
	}
}

// Reference returns the reference the repository was opened for.
func (r *Repository) Reference() Reference { return r.ref }

// lookupFor returns the function that finds the credentials for a host. It prefers the pull's
// credentials, if they are meant for the host, to the credential files. repository is the host's
// name for the repository. domain is the registry in the image's name.
func (c *Client) lookupFor(given Credentials, h hostConfig, repository,
	domain string) func(context.Context) (Credentials, error) {
	return func(ctx context.Context) (Credentials, error) {
		if given.belongTo(h.Host, h.Home, domain) {
			return given, nil
		}
		return c.sources.Load().credentials(ctx, h.Host, repository)
	}
}

const (
	maxRounds     = 3                      // rounds over all hosts for a manifest
	firstDelay    = 200 * time.Millisecond // before the second round, then doubled
	maxDelay      = 10 * time.Second
	maxRetryAfter = time.Minute // the longest Retry-After that is waited for
)

// askAll calls ask for the hosts with the given capabilities, in order, until one succeeds. After a
// temporary failure of the last host it starts again after a pause, maxRounds times at most.
func (r *Repository) askAll(ctx context.Context, caps capability, ask func(*endpoint) error) error {
	for round := 1; ; round++ {
		err := r.askOnce(ctx, caps, 0, ask)
		var u *UnavailableError
		if err == nil || !errors.As(err, &u) || !u.temporary || round == maxRounds {
			return err
		}
		if e := sleep(ctx, r.delay(round, u.after)); e != nil {
			return e
		}
	}
}

// askOnce calls ask once for each host, starting with number first. The error of the last host
// decides the code. The text has the errors of all hosts.
//
// A host that could not be reached before is skipped for this image. The last remaining host is
// always asked. A mirror that is down would otherwise delay each manifest and layer by its dial
// timeout.
func (r *Repository) askOnce(ctx context.Context, caps capability, first int, ask func(*endpoint) error) error {
	var failed []error
	places := r.hosts(caps, first)
	for i, e := range places {
		err := e.down()
		if err == nil || i == len(places)-1 {
			if err = ask(e); err == nil {
				r.noteServed(e)
			}
			if err == nil || ctx.Err() != nil {
				return err
			}
			e.noteDown(err)
		}
		failed = append(failed, atHost(e.String(), err))
	}
	return r.failure(failed)
}

// atHost names the host of a failed request, unless the error already does.
func atHost(host string, err error) error {
	if _, rest, _ := strings.Cut(err.Error(), " "); strings.HasPrefix(rest, host+": ") {
		return err
	}
	return fmt.Errorf("%s: %w", host, err)
}

// hosts returns the hosts with the given capabilities, starting with number first.
func (r *Repository) hosts(caps capability, first int) []*endpoint {
	var list []*endpoint
	n := len(r.endpoints)
	for i := range n {
		if e := r.endpoints[(first+i)%n]; e.caps&caps == caps {
			list = append(list, e)
		}
	}
	return list
}

// delay returns the pause after a number of failures. wanted is what the host asks for, at most
// maxRetryAfter.
func (r *Repository) delay(failures int, wanted time.Duration) time.Duration {
	return max(min(r.pause<<min(failures-1, 10), maxDelay), wanted)
}

// sleep waits for a duration or until ctx is done.
func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
