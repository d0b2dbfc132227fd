package podrun

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	corev1 "k8s.io/api/core/v1"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/cmd/berth/podyaml"
)

// health is the state of a pod's containers as their probes see it.
type health struct {
	mu      sync.Mutex // guards the following fields
	ready   map[string]bool
	started map[string]chan struct{} // closed when a container's startup probe succeeded once
	whole   bool                     // all containers are ready
}

func newHealth(containers []podyaml.Container) *health {
	h := &health{ready: map[string]bool{}, started: map[string]chan struct{}{}}
	for _, c := range containers {
		if !c.Init || c.Sidecar() {
			h.ready[c.Name], h.started[c.Name] = false, make(chan struct{})
		}
	}
	return h
}

// setStarted records that the container has started.
func (h *health) setStarted(container string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	select {
	case <-h.started[container]:
	default:
		close(h.started[container])
	}
}

// setReady records whether a container is ready. It returns whether this changed the container's
// state, and whether it made the whole pod ready.
func (h *health) setReady(container string, ready bool) (changed, podReady bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	changed = h.ready[container] != ready
	h.ready[container] = ready
	before := h.whole
	h.whole = true
	for _, ready := range h.ready {
		h.whole = h.whole && ready
	}
	return changed, h.whole && !before
}

// probe runs the probes of an attempt until it ends.
func (r *podRun) probe(ctx context.Context, a *attempt) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := make(chan struct{})
	defer close(stop)
	r.waits.Go(func() {
		select {
		case <-a.ended:
			cancel()
		case <-stop:
		}
	})
	name := a.container.Name
	if !r.untilHealthy(ctx, a, "startup", a.container.StartupProbe) {
		return
	}
	r.health.setStarted(name)
	defer r.setReady(a, false, nil)
	var liveness sync.WaitGroup
	defer liveness.Wait()
	if probe := a.container.LivenessProbe; probe != nil {
		liveness.Go(func() { r.checkLiveness(ctx, a, probe) })
	}
	if probe := a.container.ReadinessProbe; probe != nil {
		r.poll(ctx, a, probe, func(ok bool, err error) bool {
			r.setReady(a, ok, err)
			return true
		})
		return
	}
	r.setReady(a, true, nil)
	<-ctx.Done()
}

// untilHealthy polls a startup probe until it succeeds. After too many failures it stops the
// container and returns false.
func (r *podRun) untilHealthy(ctx context.Context, a *attempt, kind string, probe *corev1.Probe) bool {
	if probe == nil {
		return ctx.Err() == nil
	}
	healthy := false
	r.poll(ctx, a, probe, func(ok bool, err error) bool {
		if healthy = ok; !ok {
			r.stopUnhealthy(a, kind, probe, err)
		}
		return false
	})
	return healthy
}

func (r *podRun) checkLiveness(ctx context.Context, a *attempt, probe *corev1.Probe) {
	r.poll(ctx, a, probe, func(ok bool, err error) bool {
		if !ok {
			r.stopUnhealthy(a, "liveness", probe, err)
		}
		return ok
	})
}

// poll runs a probe periodically. It calls report for each series of results that reaches the
// probe's threshold, until report returns false or ctx ends.
func (r *podRun) poll(ctx context.Context, a *attempt, probe *corev1.Probe, report func(ok bool, err error) bool) {
	if !sleep(ctx, time.Duration(probe.InitialDelaySeconds)*time.Second) {
		return
	}
	series, last := int32(0), false
	for {
		err := r.probeOnce(ctx, a, probe)
		if ctx.Err() != nil {
			return
		}
		ok := err == nil
		if ok != last {
			series, last = 0, ok
		}
		series++
		threshold := probe.FailureThreshold
		if ok {
			threshold = probe.SuccessThreshold
		}
		if series >= threshold && !report(ok, err) {
			return
		}
		if !sleep(ctx, time.Duration(probe.PeriodSeconds)*time.Second) {
			return
		}
	}
}

// setReady records and reports a change of a container's readiness.
func (r *podRun) setReady(a *attempt, ready bool, err error) {
	changed, podReady := r.health.setReady(a.container.Name, ready)
	if changed && a.container.ReadinessProbe != nil {
		if ready {
			r.config.Report("[%s] ready", r.label(a.container.Name))
		} else if err != nil {
			r.config.Report("[%s] not ready: %v", r.label(a.container.Name), err)
		}
	}
	if podReady && r.plan.Pod.Spec.RestartPolicy == corev1.RestartPolicyAlways {
		r.config.Report("pod %s is ready", r.plan.Pod.Name)
	}
}

// stopUnhealthy stops a container after a failed startup or liveness probe. Its restart policy
// decides whether supervise starts it again.
func (r *podRun) stopUnhealthy(a *attempt, kind string, probe *corev1.Probe, err error) {
	r.config.Report("[%s] stopping the container: %s probe failed %d times: %v",
		r.label(a.container.Name), kind, probe.FailureThreshold, err)
	period := grace(r.plan.Pod)
	if g := probe.TerminationGracePeriodSeconds; g != nil {
		period = time.Duration(*g) * time.Second
	}
	err = newStopper(r.life, r.client, period, r.hooks()).stopOne(running{a.id, a.container}, period)
	if err != nil {
		r.config.Report("[%s] %v", r.label(a.container.Name), err)
	}
}

// probeOnce runs a probe's check once. The error says why it failed.
func (r *podRun) probeOnce(ctx context.Context, a *attempt, probe *corev1.Probe) error {
	timeout := time.Duration(probe.TimeoutSeconds) * time.Second
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	switch {
	case probe.Exec != nil:
		return r.probeExec(ctx, a, probe.Exec.Command, timeout)
	case probe.HTTPGet != nil:
		status, err := httpGet(ctx, a.container, probe.HTTPGet, r.probeHost())
		if err == nil && (status < http.StatusOK || status >= http.StatusBadRequest) {
			err = fmt.Errorf("HTTP status %d", status)
		}
		return err
	case probe.TCPSocket != nil:
		port, err := a.container.Port(probe.TCPSocket.Port)
		if err != nil {
			return err
		}
		return probeTCP(ctx, address(probe.TCPSocket.Host, r.probeHost(), port))
	case probe.GRPC != nil:
		service := ""
		if probe.GRPC.Service != nil {
			service = *probe.GRPC.Service
		}
		return probeGRPC(ctx, address("", r.probeHost(), int(probe.GRPC.Port)), service)
	}
	return errors.New("the probe has no action")
}

// probeHost returns the address at which probes reach the pod.
func (r *podRun) probeHost() string {
	if r.plan.Pod.Spec.HostNetwork || len(r.podIPs) == 0 {
		return "127.0.0.1"
	}
	return r.podIPs[0]
}

func address(host, fallback string, port int) string {
	if host == "" {
		host = fallback
	}
	return net.JoinHostPort(host, strconv.Itoa(port))
}

func (r *podRun) probeExec(ctx context.Context, a *attempt, command []string, timeout time.Duration) error {
	reply, err := r.client.ExecSync(ctx, &runtimeapi.ExecSyncRequest{
		ContainerId: a.id, Cmd: command, Timeout: int64(timeout / time.Second),
	})
	if err != nil {
		return err
	}
	if code := reply.GetExitCode(); code != 0 {
		return fmt.Errorf("command exited with code %d: %s", code, lastLine(append(reply.GetStdout(), reply.GetStderr()...)))
	}
	return nil
}

func probeTCP(ctx context.Context, address string) error {
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
	if err != nil {
		return err
	}
	return conn.Close()
}

// probeGRPC calls the health service of a server (grpc.health.v1).
func probeGRPC(ctx context.Context, address, service string) error {
	conn, err := grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }() // nothing was sent after the reply
	reply, err := healthpb.NewHealthClient(conn).Check(ctx, &healthpb.HealthCheckRequest{Service: service})
	if err != nil {
		return err
	}
	if s := reply.GetStatus(); s != healthpb.HealthCheckResponse_SERVING {
		return fmt.Errorf("gRPC health status %s", s)
	}
	return nil
}

// httpGet sends the request of a probe or hook, as kubelet does: it checks no certificates and
// follows redirects only to the same host. It returns the status of the response.
func httpGet(ctx context.Context, c podyaml.Container, get *corev1.HTTPGetAction, host string) (status int, err error) {
	port, err := c.Port(get.Port)
	if err != nil {
		return 0, err
	}
	scheme := "http"
	if get.Scheme == corev1.URISchemeHTTPS {
		scheme = "https"
	}
	url := scheme + "://" + address(get.Host, host, port) + "/" + strings.TrimPrefix(get.Path, "/")
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return 0, err
	}
	request.Header.Set("User-Agent", "berth-run")
	for _, h := range get.HTTPHeaders {
		if strings.EqualFold(h.Name, "Host") {
			request.Host = h.Value
		} else {
			request.Header.Set(h.Name, h.Value)
		}
	}
	client := &http.Client{
		Transport: &http.Transport{
			DisableKeepAlives: true,
			TLSClientConfig:   &tls.Config{InsecureSkipVerify: true}, //nolint:gosec // kubelet's probes check no certificates
		},
		CheckRedirect: func(next *http.Request, before []*http.Request) error {
			const most = 10
			if next.URL.Hostname() != before[0].URL.Hostname() || len(before) >= most {
				return http.ErrUseLastResponse
			}
			return nil
		},
	}
	response, err := client.Do(request)
	if err != nil {
		return 0, err
	}
	return response.StatusCode, response.Body.Close()
}
