"""Plan for machines that are not at hand: does a device for the draft pay, or would the target use it better?"""

import ssd

MACHINES = ("4xH100-SXM", "5xH100-SXM", "6xH100-SXM", "4xH100-SXM + 1xL40S")

models = ssd.Models(target="meta-llama/Llama-3.1-70B-Instruct", draft="meta-llama/Llama-3.2-1B-Instruct")
print(ssd.plan(ssd.Hardware.named("5xH100-SXM"), models).explain())

print("\nDevices for target and draft; speed against AR on the target's devices, and (=) on all that are used:")
print(
    f"{'machine':>20} {'mode':>5} {'target':>7} {'draft':>6} {'tokens/s':>9} {'vs AR':>7} {'vs AR =':>8} {'hit rate':>9} {'acceptance':>11}"
)
for name in MACHINES:
    for mode in ("sd", "ssd"):
        plan = ssd.plan(ssd.Hardware.named(name), models, mode=mode)
        p, place = plan.predicted, plan.placement
        draft = "shared" if place.overlaps else len(place.draft)
        hit = "" if p.hit_rate is None else f"{p.hit_rate:.0%}"
        ratios = f"{p.speedup_vs_ar:6.2f}x {p.speedup_vs_ar_equal_devices:7.2f}x"
        speed = f"{p.tokens_per_second:9.1f} {ratios} {hit:>9} {p.draft_acceptance_rate:11.0%}"
        print(f"{name:>20} {plan.mode:>5} {len(place.target):>7} {draft:>6} {speed}")
