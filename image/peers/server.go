package peers

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc/codes"

	"berth/internal/errdefs"
	"berth/internal/fair"
	"berth/internal/task"
)

// Paths of calls.
const (
	findPath     = "/berth/v1/find"
	announcePath = "/berth/v1/announce"
)

const (
	// longestWait is how long a request may wait.
	longestWait = 30 * time.Second
	// waitKey is the parameter with the milliseconds that a request waits for a layer or an upload.
	waitKey = "wait"
	// receivedHeader has the bytes of the blob that this node has received so far.
	receivedHeader = "Berth-Received"
	// burst is the number of bytes that an upload sends at once.
	burst = 256 << 10
)

// query is a request to a home node.
type query struct {
	Key  Key      `json:"key"`
	From string   `json:"from"`           // address of the asking node
	Gone []string `json:"gone,omitempty"` // addresses of nodes that turned out not to have the layer
}

// announcement says which layers a node has, or no longer fetches.
type announcement struct {
	From   string `json:"from"`
	Keys   []Key  `json:"keys"`
	Failed bool   `json:"failed,omitempty"` // the node could not fetch the layers
}

func (p *Peers) newServer(config *tls.Config) *http.Server {
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+layerPath+"{blob}", p.serveLayer)
	mux.HandleFunc("POST "+findPath, p.serveFind)
	mux.HandleFunc("POST "+announcePath, p.serveAnnounce)
	return &http.Server{
		Handler: p.guarded(mux), TLSConfig: config,
		BaseContext:       func(net.Listener) context.Context { return p.life.Context() },
		ErrorLog:          slog.NewLogLogger(p.cfg.Log.Handler(), slog.LevelDebug),
		ReadHeaderTimeout: p.cfg.CallTimeout, ReadTimeout: 2 * p.cfg.CallTimeout, IdleTimeout: 2 * time.Minute,
		MaxHeaderBytes: 16 << 10,
	}
}

// guarded turns a panic of a handler into an error of its request. Close waits for the handlers.
func (p *Peers) guarded(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		leave, ok := p.life.Enter()
		if !ok {
			http.Error(w, "berth is stopping", http.StatusServiceUnavailable)
			return
		}
		defer leave()
		err := task.Guard(p.cfg.Log, "answer peer", r.URL.Path, func() error { h.ServeHTTP(w, r); return nil })
		if err != nil {
			http.Error(w, "internal error", http.StatusInternalServerError)
		}
	})
}

// serveLayer sends a tar. A HEAD request waits for a layer that this node fetches. The answer is
// 202 if the fetch takes longer than the request may wait. A GET request waits for a free upload.
// The answer is 503 if there is none.
func (p *Peers) serveLayer(w http.ResponseWriter, r *http.Request) {
	k, wait, err := parseLayerRequest(r)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	caller := callerOf(r)
	leave, ok := p.waiting.TryAcquire(caller)
	if !ok {
		http.Error(w, "too many requests", http.StatusServiceUnavailable)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), wait)
	defer cancel()
	if r.Method == http.MethodHead {
		defer leave()
		w.WriteHeader(p.awaitLayer(ctx, w.Header(), k))
		return
	}
	finish, status := p.awaitUpload(ctx, caller, k)
	leave()
	if status != http.StatusOK {
		http.Error(w, http.StatusText(status), status)
		return
	}
	defer finish()
	p.upload(w, r, k)
}

// parseLayerRequest returns the layer, and how long the request may wait. It refuses a request for
// several ranges, because http.ServeContent would read them in a separate goroutine.
func parseLayerRequest(r *http.Request) (k Key, wait time.Duration, err error) {
	if k, err = keyOf(r.URL); err != nil {
		return k, 0, err
	}
	if strings.Contains(r.Header.Get("Range"), ",") {
		return k, 0, errors.New("only one range is served")
	}
	if text := r.URL.Query().Get(waitKey); text != "" {
		milliseconds, err := strconv.ParseUint(text, 10, 32)
		if err != nil {
			return k, 0, fmt.Errorf("%s: %w", waitKey, err)
		}
		wait = min(time.Duration(milliseconds)*time.Millisecond, longestWait)
	}
	return k, wait, nil
}

// callerOf identifies a peer by its certificate, for fair shares of the limits and for leases.
func callerOf(r *http.Request) string {
	if r.TLS == nil {
		return ""
	}
	return certificateOf(*r.TLS)
}

// certificateOf returns the hash of the client's certificate, or "" if there is none.
func certificateOf(state tls.ConnectionState) string {
	if len(state.PeerCertificates) == 0 {
		return ""
	}
	sum := sha256.Sum256(state.PeerCertificates[0].Raw)
	return string(sum[:])
}

// awaitLayer waits for a layer that this node fetches. It returns the status of the answer, and
// sets the header with the progress.
func (p *Peers) awaitLayer(ctx context.Context, header http.Header, k Key) (status int) {
	if done, received := p.running(k); done != nil {
		select {
		case <-done:
		case <-ctx.Done():
			header.Set(receivedHeader, strconv.FormatInt(received(), 10))
			return http.StatusAccepted
		}
	}
	if !p.cfg.Layers.HasShared(k) {
		return http.StatusNotFound
	}
	return http.StatusOK
}

// awaitUpload waits for a free upload of a layer that this node has. No file of the layer is open
// while it waits.
func (p *Peers) awaitUpload(ctx context.Context, caller string, k Key) (finish func(), status int) {
	if !p.cfg.Layers.HasShared(k) {
		if done, _ := p.running(k); done != nil {
			return nil, http.StatusAccepted
		}
		return nil, http.StatusNotFound
	}
	finish, err := p.uploads.Acquire(ctx, caller)
	if err != nil {
		return nil, http.StatusServiceUnavailable
	}
	return finish, http.StatusOK
}

// upload sends a tar.
func (p *Peers) upload(w http.ResponseWriter, r *http.Request, k Key) {
	tar, err := p.cfg.Layers.OpenShared(r.Context(), k)
	if err != nil {
		http.Error(w, "not found", statusOf(err))
		return
	}
	defer tar.Close() // read only
	content := &upload{
		ctx: r.Context(), peers: p, response: http.NewResponseController(w),
		from:  io.NewSectionReader(tar, 0, tar.Size()),
		meter: fair.Meter{Window: p.cfg.Stall, Rate: leastRate},
	}
	w.Header().Set("Content-Type", "application/x-tar")
	http.ServeContent(w, r, "", time.Time{}, content)
}

func statusOf(err error) int {
	switch errdefs.Code(err) {
	case codes.NotFound, codes.FailedPrecondition:
		return http.StatusNotFound
	default:
		return http.StatusInternalServerError
	}
}

// upload is a tar that is sent within the bandwidth. The peer must take each piece within the stall
// timeout, and must take at least leastRate during this time. Other peers wait for an upload.
type upload struct {
	ctx      context.Context
	peers    *Peers
	response interface {
		SetWriteDeadline(deadline time.Time) error
	}
	from  *io.SectionReader
	meter fair.Meter
	piece int       // bytes that the last Read returned
	read  time.Time // end of the last Read; since then the peer has taken the piece
}

// Read implements io.Reader.
func (u *upload) Read(b []byte) (int, error) {
	if u.piece > 0 && u.meter.Slow(int64(u.piece), time.Since(u.read)) {
		return 0, fmt.Errorf("send layer to a peer: %w", fair.ErrStalled)
	}
	b = b[:min(len(b), burst)]
	// The wait for the bandwidth limit does not count as the peer's time.
	if err := u.response.SetWriteDeadline(time.Time{}); err != nil {
		return 0, err
	}
	if err := u.peers.pace.WaitN(u.ctx, len(b)); err != nil {
		return 0, fmt.Errorf("wait for the bandwidth of uploads: %w", err)
	}
	n, err := u.from.Read(b)
	u.peers.cfg.Observer.PeerSent(n)
	u.piece, u.read = n, time.Now()
	if err := u.response.SetWriteDeadline(u.read.Add(u.peers.cfg.Stall)); err != nil {
		return 0, err
	}
	return n, err
}

// Seek implements io.Seeker.
func (u *upload) Seek(offset int64, whence int) (int64, error) { return u.from.Seek(offset, whence) }

// serveFind answers as a home node.
func (p *Peers) serveFind(w http.ResponseWriter, r *http.Request) {
	var q query
	if !p.decode(w, r, &q, func() error { return errors.Join(q.Key.Validate(), p.checkMember(q.From)) }) {
		return
	}
	answer := p.tracker.find(q.Key, identity{q.From, callerOf(r)}, q.Gone)
	w.Header().Set("Content-Type", "application/json")
	if err := json.NewEncoder(w).Encode(answer); err != nil {
		p.cfg.Log.Debug("answer peer", "peer", q.From, "error", err)
	}
}

// serveAnnounce notes what another node has.
func (p *Peers) serveAnnounce(w http.ResponseWriter, r *http.Request) {
	var a announcement
	if !p.decode(w, r, &a, func() error { return errors.Join(p.checkMember(a.From), checkKeys(a.Keys)) }) {
		return
	}
	p.tracker.note(a, callerOf(r))
	w.WriteHeader(http.StatusNoContent)
}

func checkKeys(keys []Key) error {
	if len(keys) > maxAnnounced {
		return fmt.Errorf("%d layers, more than %d", len(keys), maxAnnounced)
	}
	for _, k := range keys {
		if err := k.Validate(); err != nil {
			return err
		}
	}
	return nil
}

// checkMember rejects addresses that are not members, so that no peer can make others connect to an
// arbitrary address.
func (p *Peers) checkMember(address string) error {
	if !p.members.has(address) {
		return fmt.Errorf("%.100q is not a member", address)
	}
	return nil
}

// decode reads and checks the JSON of a call. If it returns false, it has answered.
func (p *Peers) decode(w http.ResponseWriter, r *http.Request, into any, check func() error) bool {
	err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxBody)).Decode(into)
	if err == nil {
		err = check()
	}
	if err != nil {
		p.cfg.Log.Debug("request of a peer refused", "path", r.URL.Path, "error", err)
		http.Error(w, err.Error(), http.StatusBadRequest)
		return false
	}
	return true
}
