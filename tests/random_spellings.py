"""The statements that random programs are made of: one line of torch each, operands in braces.

``{A:ij}`` is a real tensor of shape [i, j], its letters bound from left to right (``W`` first), digits literal;
``{A}`` the same again; ``{A:*}`` any shape but a scalar's, ``{B:*}`` the same shape, ``{B:+}`` one that broadcasts to
it; ``{A:**}`` any shape; ``{A!:…}`` one that differs from sample to sample; ``{I:k<n}`` indices of shape [k] below
the size n; ``{M:ij?}`` booleans; ``{#i}`` an int in [-i, i); ``{=i}`` the size i; ``{f}`` a positive number;
``{dim}`` an axis of ``A``; ``{out}`` the result.
"""

ELEMENTWISE = """
torch.tanh({A:**}) | {A:*}.sigmoid() | F.gelu({A:*}) | F.gelu({A:*}, approximate="tanh") | F.silu({A:*})
F.softplus({A:*}) | F.elu({A:*}, {f}) | F.leaky_relu({A:*}, 0.1) | torch.relu({A:*}) | F.relu6({A:*}) | F.mish({A:*})
F.selu({A:*}) | F.celu({A:*}) | F.hardtanh({A:*}) | F.hardswish({A:*}) | F.hardsigmoid({A:*}) | F.softsign({A:*})
F.logsigmoid({A:*}) | F.tanhshrink({A:*}) | F.softshrink({A:*}, 0.2) | F.hardshrink({A:*}, 0.2)
F.threshold({A:*}, 0.1, 0.3) | F.prelu({A:k}, {W:k}.mean().reshape(1)) | F.glu(torch.cat([{A:*}, {B:*}], -1))
torch.exp(-({A:**} ** 2)) | torch.log1p({A:*} ** 2) | torch.sqrt({A:*} ** 2 + {f}) | torch.rsqrt({A:*}.square() + {f})
torch.sin({A:**}) | {A:*}.cos() | torch.atan({A:*}) | torch.asinh({A:*}) | torch.erf({A:*})
torch.clamp({A:*}, -{f}, {f}) | {A:*}.clamp(min=-{f}) | {A:*}.clip(max={f}) | torch.clamp({A:*}, min={B:+})
{A:**}.abs() | torch.where({A:*} > 0, {B:*}, {f} * {C:+}) | torch.where({M:*?}, {A:*}, {B:+})
torch.where({M:*?}, {A:*}, 0.0) | {A:*} / (1 + {B:+} ** 2) | {A:*}.div(2 + {B:+}.sin()) | ({A:*}.abs() + 0.1) ** 1.5
torch.pow({f}, {A:*}) | {A:*} ** 2 | ({A:*}.abs() + {f}) ** {B:+} | torch.atan2({A:*}, 1 + {B:*} ** 2)
torch.hypot({A:*}, {B:*} + 3) | torch.lerp({A:*}, {B:*}, 0.3) | torch.lerp({A:*}, {B:*}, {C:*})
torch.addcmul({A:*}, {B:*}, {C:+}, value={f}) | torch.addcdiv({A:*}, {B:*}, {C:*} ** 2 + 1)
torch.maximum({A:*}, {B:*}) | torch.minimum({A:*}, {B:+}) | torch.fmax({A:*}, {B:*}) | torch.logaddexp({A:*}, {B:*})
{A:*} + {B:+} | {A:*} - {f} * {B:+} | {A:*} * {B:+} | {A:*} * {B:*} | {A:**} * {f} | {f} - {A:*}
{f} / (1.5 + {A:*} ** 2) | torch.add({A:*}, {B:+}, alpha={f}) | torch.sub({A:*}, {B:*}) | torch.rsub({A:*}, {B:*})
torch.mul({A:*}, {B:+}) | -{A:*} | torch.xlogy({A:*}, {B:*} ** 2 + 1) | torch.special.expit({A:*})
torch.lgamma({A:*} ** 2 + 1) | torch.digamma({A:*} ** 2 + 1) | torch.special.i0e({A:*}) | torch.sinc({A:*})
torch.fmod({A:*}, {f}) | torch.remainder({A:*}, {f}) | torch.frac({A:*}) | torch.nan_to_num({A:*})
torch.copysign({A:*}, {B:*}) | torch.log({A:*}.abs() + {f}) | torch.expm1({A:*} / 4) | {A:*}.sinh()
torch.ldexp({A:*}, {I:*<3}) | torch.square({A:*}) | {A:*}.reciprocal().clamp(-2, 2) | torch.positive({A:*})
torch.acos(torch.tanh({A:*}) / 2) | {A:*}.masked_fill({M:*?}, {f}) | {A:*}.masked_fill({M:+?}, 0.0) | {A:*} * {M:+?}
({A:*} > {B:+}) * {A} | torch.float_power({A:*}, 2) | {A:*} * 2 if {A}.ndim else {A} | sum([{A:*}, {B:*}, {C:*}])
{A:**} + 1j * {B:**} | {A:*}.round() + {B:*} | {A:*}.float().to({A}.dtype)
"""

PRODUCTS = """
{A:ij} @ {B:j} | {A:i} @ {B:ij} | {A:ij} @ {B:jk} | {A:ij} @ {B:kj}.T | {A:ij}.T @ {B:ik} | {A:ij}.mT @ {B:i}
{A:i} @ {B:i} | torch.mv({A:ij}, {B:j}) | torch.mm({A:ij}, {B:jk}) | torch.matmul({A:bij}, {B:jk})
torch.matmul({A:bij}, {B:bjk}) | torch.matmul({A:ij}, {B:bjk}) | torch.matmul({A:bij}, {B:j})
torch.matmul({A:i}, {B:bij}) | torch.bmm({A:bij}, {B:bjk}) | torch.bmm({A:bij}, {W:jk}.expand({=b}, -1, -1))
torch.baddbmm({C:bik}, {A:bij}, {B:bjk}, beta={f}) | torch.mm({W:ij}, {W}.T)
torch.addmm({C:ik}, {A:ij}, {B:jk}, alpha={f}) | torch.addmm({C:k}, {A:ij}, {B:jk}, beta={f})
torch.addmv({C:i}, {A:ij}, {B:j}) | torch.addbmm({C:ik}, {A:bij}, {B:bjk}) | torch.addr({C:ij}, {A:i}, {B:j})
torch.outer({A:i}, {B:j}) | torch.ger({A:i}, {B:j}) | torch.dot({A:i}, {B:i}) | torch.vdot({A:i}, {B:i})
torch.inner({A:ij}, {B:kj}) | torch.linalg.vecdot({A:ij}, {B:ij}) | torch.einsum("ij,j->i", {A:ij}, {B:j})
torch.einsum("bij,kj->bik", {A:bij}, {B:kj}) | torch.einsum("i,j->ij", {A:i}, {B:j})
torch.einsum("ij,ij->", {A:ij}, {B:ij}) | torch.einsum("ij,jk,kl->il", {A:ij}, {B:jk}, {C:kl})
torch.einsum("ii->i", {A:ii}) | torch.einsum("ij->ji", {A:ij}) | torch.einsum("bi,bj,ij->b", {A:bi}, {B:bj}, {W:ij})
torch.einsum("...i,ij->...j", {A:bki}, {W:ij}) | torch.einsum("i,ij,j", {A:i}, {W:ij}, {B:j})
torch.einsum("oi,ti->to", {W:oi}, {A:ti}) | torch.einsum("ij,kj->ik", {W:ij}, {W})
torch.einsum("i,i->i", {A:i}, {B:i}) | torch.einsum("bij,bjk->ik", {A:bij}, {B:bjk})
torch.einsum("hio,ti->hto", {W:hio}, {A:ti}) | torch.tensordot({A:ij}, {B:jk}, dims=1)
torch.tensordot({A:ijk}, {B:jkl}, dims=2) | torch.tensordot({A:ij}, {B:ik}, dims=([0], [0]))
({A:ij} * {B:j}).sum(-1) | ({A:ij} * {B:i}[:, None]).sum(0) | ({A:ij}[..., None] * {B:jk}).sum(-2)
({A:i}[:, None] * {W:ij}).mean(0) | F.linear({A:j}, {W:ij}) | F.linear({A:j}, {W:ij}, {C:i})
F.linear({A:kj}, {W:ij}) | F.linear({A:kj}, {W:ij}, {C:i}) | F.linear({A:bkj}, {W:ij}, {C:i})
F.linear({A:j}, {W:ij}.detach(), {C:i}) | F.linear({A:i}, {W:ij}.T, {C:j}) | F.linear({W:ij}, {W})
F.bilinear({A:i}, {B:j}, {W:kij}, {C:k}) | F.bilinear({A:ni}, {B:nj}, {W:kij}) | torch.kron({A:ij}, {B:k2})
torch.linalg.multi_dot([{A:ij}, {B:jk}, {C:kl}]) | torch.matrix_power({A:ii} / 2, 3) | torch.trace({A:ij} @ {B:ji})
torch.cosine_similarity({A:ij}, {B:ij}, dim=-1) | F.cosine_similarity({A:i}, {B:i}, dim=0)
F.pairwise_distance({A:ij}, {B:ij}) | torch.cdist({A:ij}, {B:kj}) | torch.cov({A:i4})
torch.block_diag({A:ij}, {B:kl}) | torch.cdist({A:ij}, {B:kj}, p=1.0) | torch.linalg.cross({A:i3}, {B:i3})
({W:ij} * {M:ij?}) @ {A:j} | ({A:ij} @ {B:j} + {C:i}).tanh() @ {A} | ({W:ij} + {A:i}[:, None]) @ {B:j}
{W:ij} @ ({W}.T @ {A:i}) | {W:ij}[:, :1] @ {A:1} + {W} @ {B:j} | ({W:ij} @ {V:jk}) @ {A:k}
F.linear({A:j}, {W:ij} @ {V:jj}) | {W:ij} * {V:ij} @ {A:j} | F.normalize({W:ij}, dim=1) @ {A:j}
F.scaled_dot_product_attention({A:ki}, {B:li}, {C:li})
F.scaled_dot_product_attention({A:hki}, {B:hli}, {C:hli}, is_causal=True)
F.scaled_dot_product_attention({A:ki} @ {W:ij}, {A} @ {V:ij}, {A}) | ({A:ki} @ {B:li}.T).softmax(-1) @ {C:lj}
F.scaled_dot_product_attention({A:ki}, {B:li}, {C:li}, attn_mask={D:kl}) | torch.stack([{W:ij} @ x for x in {A:kj}])
torch.cat([{W:ij} @ {A:j}, {W} @ {B:j}]) | {W:ij}.unflatten(0, (1, {=i})) @ {A:j} | {W:ij}.t() @ {A:i}
{A:j} @ {W:ij}.t() | {W:ij}.to({W}.dtype) @ {A:j} | {W:ij}.clone() @ {A:j} | {W:ij}.contiguous() @ {A:j}
{W:ij}.reshape(-1) @ {A:ij}.reshape(-1) | torch.vmap(lambda x: {W:ij} @ x)({A:kj})
"""

CONVOLUTIONS = """
F.conv1d({A:c5}, {W:oc3}, padding=1) | F.conv1d({A:c4}, {W:oc2}) | F.conv1d({A:nc5}, {W:oc2}, {C:o}, stride=2)
F.conv1d({A:c6}, {W:oc2}, dilation=2) | F.conv1d({A:c5}, {W:c13}, groups={=c}, padding=1)
F.conv1d({A:nc4}, {W:c12}, {C:c}, groups={=c}) | F.conv1d({A:c5}, {W:oc3}, padding="same")
F.conv2d({A:c44}, {W:oc22}, {B:o}, stride=2) | F.conv2d({A:nc33}, {W:oc33}, padding=1) | F.conv2d({A:c33}, {W:oc22})
F.conv2d({A:c33}, {W:c122}, groups={=c}) | F.conv2d({A:c33}, {W:oc11}, {B:o}) | F.conv_transpose1d({A:c4}, {W:co3})
F.conv_transpose1d({A:nc3}, {W:co2}, {B:o}, stride=2) | F.conv1d({A:nc5}, {W:oc3}, padding="valid")
F.conv_transpose2d({A:c22}, {W:co22}, {B:o}) | F.conv_transpose2d({A:nc22}, {W:co22}, stride=2)
F.conv3d({A:c222}, {W:oc222}) | F.conv1d({W:oc3}, {A:ec2}) | F.conv1d({A:c6}, {W:oc2}).relu().sum(-1)
F.conv1d(F.pad({A:c4}, (2, 0)), {W:oc3}) | F.unfold({A:nc33}, 2) | F.max_pool1d({A:c6}, 2) | F.avg_pool1d({A:c6}, 2)
F.adaptive_avg_pool1d({A:c5}, 2) | F.max_pool2d({A:nc44}, 2) | F.avg_pool2d({A:c44}, 2)
F.adaptive_max_pool1d({A:c6}, 3) | F.lp_pool1d({A:c4} ** 2 + 1, 2, 2) | F.interpolate({A:nc3}, scale_factor=2)
F.interpolate({A:nc33}, size=(4, 2), mode="bilinear") | F.pixel_shuffle({A:4ij}, 2) | F.channel_shuffle({A:n4ij}, 2)
F.conv_transpose1d({A:c3}, {W:c12}, groups={=c}) | F.conv2d({A:c33}[None], {W:oc22})[0]
F.adaptive_avg_pool2d({A:c44}, (2, 1)) | F.fold({A:4k}[:, :1], (2, 2), 2)
"""

LOOKUPS = """
F.embedding({I:k<n}, {W:nd}) | F.embedding({I:<n}, {W:nd}) | F.embedding({I:bk<n}, {W:nd})
F.embedding({I:k<n}, {W:nd}, padding_idx=0) | {W:nd}[{I:k<n}] | {W:nd}[{I:<n}] | {W:nd}[{I:k<n}, {J:k<d}]
{W:nd}[:, {I:k<d}] | {W:nd}[{I:k<n}][:, {J:m<d}] | {W:n}[{I:bk<n}] | {W:nde}[{I:k<n}, :, {J:k<e}]
torch.index_select({W:nd}, 0, {I:k<n}) | {W:nd}.index_select(1, {I:k<d}) | torch.gather({A:nd}, 1, {I:nk<d})
{A:nd}.gather(0, {I:kd<n}) | torch.take_along_dim({A:nd}, {I:n1<d}, 1) | {A:nd}.scatter(1, {I:n1<d}, {B:n1})
torch.scatter_add({A:nd}, 1, {I:nk<d}, {B:nk}) | torch.take({A:n}, {I:k<n})
torch.index_add({A:nd}, 0, {I:k<n}, {B:kd}) | {A:nd}.index_add(1, {I:k<d}, {B:nk}, alpha={f})
{A:nd}.index_fill(0, {I:k<n}, {f}) | {A:n}.index_copy(0, {I:1<n}, {B:1})
{A:nd}.index_put(({I:k<n},), {B:kd}, accumulate=True) | torch.scatter_reduce({A:n}, 0, {I:k<n}, {B:k}, "sum")
torch.scatter_reduce({A:n}, 0, {I:k<n}, {B:k}, "amax") | F.one_hot({I:k<n}, {=n}).to({W:nd}.dtype) @ {W}
F.embedding_bag({I:bk<n}, {W:nd}, mode="mean") | F.embedding_bag({I:bk<n}, {W:nd}, mode="sum")
{W:nd}[{I:<n}][{J:<d}] | {A:ij}[{#i}] | {A:ij}[:, {#j}] | {A:ij}[..., -1] | {A:i}[{#i}] | {A:ijk}[:, {#j}]
{A:ij}[1:] | {A:ij}[:, ::2] | {A:ij}[:-1, 1:] | {A:ij}[None, :, None] | {A:i}[-2:] | {A:ijk}[{#i}, :, {#k}]
{A:ij}[[{#i}, {#i}]] | {A:ij}[{#i}, [{#j}, {#j}]] | {A:ij}.narrow(0, 0, 1) | {A:ij}.select(1, {#j})
{A:ij}.diagonal() | torch.diag({A:ij}) | torch.diag({A:i}) | torch.diag_embed({A:i}) | torch.tril({A:ij})
{A:ij}.triu(1) | {A:ij}.unbind(1)[0] | {A:ij}.split(1)[-1] | {A:ij}.chunk(2, 1)[0] | torch.tensor_split({A:i}, 2)[0]
{A:i}.unfold(0, 1, 1) | {A:ij}.unfold(1, 2, 1) | {A:ij}.diagonal(offset=-1) | {A:ij}[torch.arange({=i}), {I:i<j}]
{A:ij}[{I:i<i}.argsort()] | {A:ij}[torch.tensor([{#i}, {#i}])] | {W:nd}[{I:k<n}].sum(0) @ {W}.T
F.nll_loss({A:ij}.log_softmax(1), {I:i<j}, reduction="none") | F.cross_entropy({A:ij}, {I:i<j})
F.cross_entropy({A:j}, {I:<j}) | F.cross_entropy({A:ij}, {I:i<j}, label_smoothing=0.1)
F.cross_entropy({A:ij} @ {W:jk}, {I:i<k}, reduction="sum") | F.cross_entropy({A:j}, {B:j}.softmax(0))
F.multi_margin_loss({A:ij}, {I:i<j}) | F.cross_entropy({A:ij}, {I:i<j}, ignore_index=0, reduction="sum")
torch.bucketize({A:*}, torch.linspace(-1, 1, 3)) * {A} | {A:ij}[{I:k<i}, 0] * {f}
{A:ij}.take_along_dim({A}.argmax(1, keepdim=True), 1) | torch.searchsorted({A:i}.sort()[0], {B:k}) * {B}
{A:ij}[-1, {I:<j}]
"""

SHAPES = """
torch.cat([{A:*}, {B:*}]) | torch.cat([{A:ij}, {B:ik}], 1) | torch.stack([{A:*}, {B:*}], -1)
torch.hstack([{A:*}, {B:*}]) | torch.vstack([{A:i}, {B:i}]) | torch.column_stack([{A:i}, {B:i}])
F.pad({A:*}, (1, 1)) | F.pad({A:ij}, (0, 1, 1, 0), value={f}) | F.pad({A:c4}, (1, 2), mode="circular")
F.pad({A:c4}, (1, 2), mode="reflect") | F.pad({A:c4}, (1, 1), mode="replicate") | F.pad({A:*}, (-1, 1))
torch.roll({A:*}, 1, {dim}) | torch.roll({A:*}, 2) | torch.flip({A:*}, [{dim}]) | torch.flip({A:ij}, [0, 1])
torch.rot90({A:ij}) | {A:ij}.tile(2) | {A:ij}.repeat(2, 1) | torch.repeat_interleave({A:*}, 2, {dim})
{A:i}.expand(3, -1) | {A:1i}.expand(2, -1) | {A:ijk}.permute(2, 0, 1) | {A:*}.movedim({dim}, 0)
{A:*}.transpose({dim}, -1) | {A:ijk}.mT | {A:ij}.T | {A:*}.unsqueeze({dim}) | {A:i1}.squeeze(-1) | {A:*}.flatten()
{A:*}.reshape(-1) | {A:ij}.reshape({=j}, {=i}) | {A:ij}.T.reshape({=i}, {=j}) | {A:ij}.contiguous().view(-1)
{A:i}.view(1, -1) | {A:4i}.unflatten(0, (2, 2)) | torch.broadcast_to({A:i}, (2, {=i})) | torch.ravel({A:*})
torch.meshgrid({A:i}, {B:j}, indexing="ij")[0] | torch.cartesian_prod({A:i}, {B:j}) | torch.atleast_2d({A:**})
{A:ij}.swapaxes(0, 1) | torch.combinations({A:3}) | {A:*}.clone() | {A:*}.squeeze() | {A:ij}.new_zeros({=j}) + {A}
torch.zeros_like({A:*}) + {A} * {B:+} | torch.full_like({A:*}, {f}) * {A} | torch.eye({=i}, dtype={A:ii}.dtype) * {A}
torch.arange({=i}).to({A:i}.dtype) * {A} | {A:ij}[:, None] - {B:kj}[None] | {A:*}.type_as({A})
"""

REDUCTIONS = """
{A:**}.sum() | {A:*}.sum({dim}) | {A:*}.mean({dim}, keepdim=True) | {A:**}.mean() | {A:*}.var({dim}, correction=0)
{A:*}.std({dim}, correction=0, keepdim=True) | torch.var({A:*}, correction=0) | {A:*}.prod({dim}) | {A:*}.prod()
torch.logsumexp({A:*}, {dim}) | {A:*}.logsumexp({dim}, keepdim=True) | {A:*}.amax({dim}) | {A:*}.amin({dim})
{A:*}.max() | {A:*}.min() | {A:*}.max({dim})[0] | {A:*}.min({dim}).values | {A:*}.median({dim})[0] | {A:*}.median()
torch.aminmax({A:*}).max | {A:*}.sort({dim})[0] | {A:*}.sort({dim}, descending=True).values | {A:*}.topk(1, {dim})[0]
{A:3i}.topk(2, 0)[0] | {A:*}.kthvalue(1, {dim})[0] | {A:*}.cummax({dim})[0] | {A:*}.cumsum({dim})
{A:*}.cumprod({dim}) | torch.logcumsumexp({A:*}, {dim}) | {A:*}.msort() | torch.softmax({A:*}, {dim})
{A:*}.log_softmax({dim}) | F.softmin({A:*}, {dim}) | F.layer_norm({A:ki}, ({=i},))
F.layer_norm({A:ki}, ({=i},), {W:i}, {B:i}) | F.layer_norm({A:i}, ({=i},), {W:i})
F.layer_norm({A:ij}, ({=i}, {=j}), {W:ij}) | F.group_norm({A:n4i}, 2, {W:4}, {B:4}) | F.group_norm({A:n2i}, 1)
F.instance_norm({A:nc3}) | F.instance_norm({A:nc4}, weight={W:c}, bias={B:c}) | F.rms_norm({A:ki}, ({=i},), {W:i})
F.normalize({A:*}, dim={dim}) | {A:*}.norm() | {A:*}.norm(dim={dim}) | torch.linalg.norm({A:*})
torch.linalg.vector_norm({A:*}, 1) | {A:ij}.norm(p=3, dim=1) | torch.linalg.matrix_norm({A:ij})
torch.renorm({A:ij}, 2, 0, 1.0) | torch.quantile({A:i}, 0.3) | torch.nansum({A:*})
torch.std_mean({A:*}, correction=0)[0] | torch.diff({A:*}, dim={dim}) | torch.trapezoid({A:*})
torch.gradient({A:4})[0] | {A:*}.count_nonzero() * {A} | {A:*}.argmax() * {A} | torch.dist({A:*}, {B:*})
F.mse_loss({A:*}, {B:*}) | F.mse_loss({A:*}, {B:*}, reduction="none") | F.smooth_l1_loss({A:*}, {B:*})
F.huber_loss({A:*}, {B:*}, reduction="sum") | F.l1_loss({A:*}, {B:*})
F.kl_div({A:*}.log_softmax(-1), {B:*}.softmax(-1), reduction="sum")
F.binary_cross_entropy_with_logits({A:*}, {M:*?}.to({A}.dtype))
F.binary_cross_entropy({A:*}.sigmoid(), {B:*}.sigmoid()) | F.poisson_nll_loss({A:*}, {B:*})
F.gaussian_nll_loss({A:i}, {B:i}, {C:i} ** 2 + 0.1) | F.soft_margin_loss({A:*}, {B:*}.sign())
F.margin_ranking_loss({A:i}, {B:i}, torch.ones({=i})) | F.triplet_margin_loss({A:ij}, {B:ij}, {C:ij})
F.cosine_embedding_loss({A:ij}, {B:ij}, torch.ones({=i})) | F.local_response_norm({A:nc3}, 2)
F.hinge_embedding_loss({A:*}, {M:*?} * 2 - 1) | torch.cumulative_trapezoid({A:*}) | {A:*}.nanmean()
torch.corrcoef({A:24})
"""

LINEAR_ALGEBRA = """
torch.linalg.solve({A:ii} + 4 * torch.eye({=i}, dtype={A}.dtype), {B:ij})
torch.linalg.solve({A:ii} + 4 * torch.eye({=i}, dtype={A}.dtype), {B:i})
torch.linalg.inv({A:ii} + 4 * torch.eye({=i}, dtype={A}.dtype))
torch.linalg.slogdet({A:ii} + 4 * torch.eye({=i}, dtype={A}.dtype))[1] | torch.linalg.det({A:ii})
torch.logdet({A:ij} @ {A}.T + torch.eye({=i}, dtype={A}.dtype))
torch.linalg.cholesky({A:ij} @ {A}.mT + torch.eye({=i}, dtype={A}.dtype))
torch.linalg.qr({A:22} + 3 * torch.eye(2, dtype={A}.dtype))[1] | torch.linalg.svdvals({A:ij})
torch.linalg.matrix_exp({A:ii} / 4) | torch.linalg.pinv({A:ij}) | torch.linalg.eigvalsh({A:ii} + {A}.T)
torch.linalg.solve_triangular({A:ii}.tril() + 4 * torch.eye({=i}, dtype={A}.dtype), {B:ij}, upper=False)
torch.cholesky_solve({B:ij}, torch.linalg.cholesky({A:ii} @ {A}.T + torch.eye({=i}, dtype={A}.dtype)))
torch.linalg.matrix_norm({A:ij}, "nuc") | torch.linalg.cond({A:22} + 3 * torch.eye(2, dtype={A}.dtype))
torch.linalg.lstsq({A:32} + torch.eye(3, 2, dtype={A}.dtype), {B:3k}).solution
torch.linalg.eigh({A:22} @ {A}.T + torch.diag(torch.arange(2.0)).to({A}.dtype))[0] | torch.linalg.vander({A:3})
torch.linalg.lu_factor({A:ii} + 4 * torch.eye({=i}, dtype={A}.dtype))[0]
torch.linalg.tensorsolve({A:ii} + 4 * torch.eye({=i}, dtype={A}.dtype), {B:i}) | torch.fft.rfft({A:*}).abs()
torch.fft.fft({A:*}).real | torch.fft.irfft({A:*} + 0j, n=4) | torch.fft.fft2({A:ij}).imag | torch.fft.ifft({A:*})
torch.fft.rfft({A:*}) | torch.fft.fft({A:*}) * torch.fft.fft({B:*}) | torch.fft.fftshift({A:*})
torch.complex({A:*}, {B:*}) | torch.polar({A:*}.exp(), {B:*}) | torch.view_as_complex({A:i2}.contiguous())
torch.view_as_real({A:*} * 1j) | (1j * {A:*}).exp().real | {A:*}.conj() * {B:*} | {A:*}.angle() * {B:*}
torch.real({A:*} * (1 + 2j)) | ({A:ij} + 0j) @ ({B:j} * 1j)
"""

CONSTANTS = """
{A:*}.detach() * {B:+} | stop_gradient({A:*}) + {B:*} | torch.sign({A:*}.detach()) * {B:*}
({A:*} - {B:*}.detach()) ** 2 | {A:*} * ({A} > 0).to({A}.dtype) | {A:*} * float({=k}) | {A:*} + {B:*}.detach() - {B}
{A:*}.data * {B:*}
"""

BLOCKS = """
h = {B:i}
for t in range({=k}):
    h = torch.tanh({W:ii} @ h + {A:ki}[t])
{out} = h
---
h, states = {B:i}, []
for x in {A:kj}:
    h = torch.sigmoid({W:ii} @ h + {V:ij} @ x)
    states.append(h)
{out} = torch.stack(states)
---
h = {A:i}
for _ in range(3):
    h = h + 0.1 * F.linear(h.relu(), {W:ii}, {B:i})
{out} = h
---
h = {B:i} * 0
for x in {A:ki}.unbind():
    h = torch.where(x > 0, {f} * h + {W:ii} @ x, h)
{out} = h
---
h, c = {B:i}, {C:i}
for x in {A:kj}.unbind():
    a, b = (F.linear(torch.cat([x, h]), torch.cat([{V:ij}, {W:ii}], 1)) * torch.ones(2, 1, dtype=x.dtype)).unbind()
    c = torch.sigmoid(a) * c + torch.tanh(b)
    h = torch.tanh(c)
{out} = h
---
{out} = {B:**}
for x in {A:ki}:
    {out} = 0.9 * {out} + x.sum()
---
{out} = {A!:*}.clone()
{out}.mul_({B:+})
---
{out} = {A!:*} * {f}
{out} += {B:+}
---
{out} = {A!:ij}.clone()
{out}[{#i}] = {B:j}
---
{out} = {A!:ij} + 0
{out}[:, {#j}] += {B:i}
---
{out} = {A!:ij} * 1.5
{out}[0].mul_({B:j})
---
{out} = {A!:ij}.sin()
row = {out}[1:]
row.add_({B:j})
---
{out} = {A!:*}.exp()
{out}.clamp_(max={f})
---
{out} = {A!:*} + 1
{out}.relu_().neg_()
---
{out} = {A!:nd}.clone()
{out}.index_add_(0, {I:k<n}, {B:kd})
---
{out} = {A!:nd}.clone()
{out}.scatter_add_(1, {I:nk<d}, {B:nk})
---
{out} = {A!:nd}.clone()
{out}[{I:k<n}] += {B:kd}
---
{out} = {A!:nd} * 1
{out}.index_put_(({I:k<n},), {B:kd}, accumulate=True)
---
{out} = {A!:ij}.T.clone()
{out}.t_().div_({f})
---
{out} = {A!:*} / 2
{out}.masked_fill_({M:*?}, {f})
---
{out} = torch.empty_like({A!:*})
{out}.copy_({B:+})
{out} = {out} * {A}
---
{out} = {A!:ii} + 0
{out}.diagonal().mul_({B:i})
---
{out} = {A!:ij} + 0
{out}.view(-1)[::2].sub_({f})
---
{out} = {A!:ij} + 0
{out}.T.addmm_({B:jk}, {C:ki})
---
{out} = {A!:i} * 2
{out}.addmv_({B:ij}, {C:j})
---
{out} = F.dropout({A:*}, 0.5, training=False)
---
q, k, v = F.linear({A:ti}, torch.cat([{W:ji}, {V:ji}, {U:ji}])).chunk(3, -1)
{out} = (q @ k.T / {=j} ** 0.5).softmax(-1) @ v
---
gates = F.linear({A:j}, {W:ij}) + {B:i}
a, b = gates[: {=i} // 2], gates[{=i} // 2 :]
{out} = torch.cat([a.sigmoid(), b.tanh()])
---
low, high = {A:*}.aminmax()
{out} = ({A} - low) / (high - low + 1)
---
values, places = {A:*}.flatten().topk(1)
{out} = values * {B:1} + places
---
{out} = torch.func.functional_call(LINEAR, {"weight": {W:32}, "bias": {B:3}}, ({A:k2},))
---
{out} = torch.gru_cell({A:kj}, {B:k2}, {W:6j}, {V:62})
---
{out} = torch.lstm_cell({A:kj}, ({B:k2}, {C:k2}), {W:8j}, {V:82})[1]
---
with torch.no_grad():
    scale = {A:*}.abs().amax() + 1
{out} = {A} / scale * {B:+}
---
bias, out_bias = {C:6}, {D:2}
{out} = F.multi_head_attention_forward(
    {A:t12}, {B:s12}, {B}, 2, 1, {W:62}, bias, None, None, False, 0.0, {V:22}, out_bias
)[0]
---
{out} = torch.autograd.grad(({A:*} * {B:+}).sin().sum(), {A}, create_graph=True)[0]
"""

TERMS = """
{A:**}.sum() | {A:**}.mean() | ({A:**} ** 2).sum() | torch.sin({A:**}).sum() | ({A:*} * {B:*}).sum()
torch.logsumexp({A:*}.flatten(), 0) | {A:**}.square().mean() | F.smooth_l1_loss({A:*}, {B:*})
{A:*}.flatten() @ {B:*}.flatten() | {A:*}.abs().sum() | {A:**}.tanh().sum() | {A:*}.norm() | {A:*}.amax()
{f} * {A:**}.sum() | F.mse_loss({A:*}, {B:*}.detach()) | {A:*}.std(correction=0) | {A:*}.cos().prod()
{A:*}.flatten()[0]
"""

COMPLEX_TERMS = """
{Z}.abs().sum() | {Z}.real.sum() | torch.view_as_real({Z}).sin().sum() | ({Z} * {Z}.conj()).real.sum()
{Z}.imag.mean() | {Z}.abs().square().sum()
"""

KINDS = {
    "elementwise": (3, ELEMENTWISE),
    "products": (6, PRODUCTS),
    "convolutions": (1.5, CONVOLUTIONS),
    "lookups": (3, LOOKUPS),
    "shapes": (2.5, SHAPES),
    "reductions": (3, REDUCTIONS),
    "linear algebra": (1, LINEAR_ALGEBRA),
    "constants": (0.7, CONSTANTS),
}


def lines_of(table):
    return [entry.strip() for line in table.strip().splitlines() for entry in line.split(" | ")]


SPELLINGS = [
    *((weight, lines_of(table)) for weight, table in KINDS.values()),
    (2.5, [block.strip() for block in BLOCKS.split("---")]),
]
