package podyaml

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// Port returns the number of a container's port, which can be given by its name.
func (c Container) Port(port intstr.IntOrString) (int, error) {
	if port.Type == intstr.Int {
		return port.IntValue(), nil
	}
	for _, p := range c.Ports {
		if p.Name == port.StrVal {
			return int(p.ContainerPort), nil
		}
	}
	if number := port.IntValue(); number > 0 {
		return number, nil
	}
	return 0, fmt.Errorf("container %s has no port %q", c.Name, port.StrVal)
}

func (c *checker) probes(ctr Container) {
	for _, p := range []struct {
		name  string
		probe *corev1.Probe
	}{{"startupProbe", ctr.StartupProbe}, {"livenessProbe", ctr.LivenessProbe}, {"readinessProbe", ctr.ReadinessProbe}} {
		if p.probe == nil {
			continue
		}
		at := ctr.Path + "." + p.name
		if ctr.Init && !ctr.Sidecar() {
			c.add(at, "only a container that keeps running can have it")
		}
		c.probe(ctr, at, p.probe)
		if p.name != "readinessProbe" && p.probe.SuccessThreshold != 1 {
			c.add(at+".successThreshold", "must be 1")
		}
		if g := p.probe.TerminationGracePeriodSeconds; g != nil && (*g < 1 || p.name == "readinessProbe") {
			c.add(at+".terminationGracePeriodSeconds", "must be positive, and is not possible in a readinessProbe")
		}
	}
}

func (c *checker) probe(ctr Container, at string, p *corev1.Probe) {
	if sources(&p.ProbeHandler) != 1 {
		c.add(at, "needs one of exec, httpGet, tcpSocket, grpc")
		return
	}
	switch {
	case p.Exec != nil && len(p.Exec.Command) == 0:
		c.add(at+".exec.command", "is needed")
	case p.HTTPGet != nil:
		c.port(ctr, at+".httpGet.port", p.HTTPGet.Port)
		oneOf(c, at+".httpGet.scheme", p.HTTPGet.Scheme, corev1.URISchemeHTTP, corev1.URISchemeHTTPS)
	case p.TCPSocket != nil:
		c.port(ctr, at+".tcpSocket.port", p.TCPSocket.Port)
	case p.GRPC != nil:
		c.port(ctr, at+".grpc.port", intstr.FromInt32(p.GRPC.Port))
	}
	for _, n := range []struct {
		name  string
		value int32
	}{
		{"initialDelaySeconds", p.InitialDelaySeconds}, {"timeoutSeconds", p.TimeoutSeconds},
		{"periodSeconds", p.PeriodSeconds}, {"successThreshold", p.SuccessThreshold},
		{"failureThreshold", p.FailureThreshold},
	} {
		if n.value < 0 {
			c.add(at+"."+n.name, "must not be negative")
		}
	}
}

func (c *checker) port(ctr Container, at string, port intstr.IntOrString) {
	const most = 65535
	number, err := ctr.Port(port)
	if err != nil {
		c.add(at, "%v", err)
	} else if number < 1 || number > most {
		c.add(at, "%d is not between 1 and %d", number, most)
	}
}
